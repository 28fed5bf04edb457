"""The command line: `python -m fusion_passes explain | list | doctor`.

Exit status: 0; 1 where a required fusion was applied nowhere (explain) or something must be done (doctor); 2 where the
command could not do its work, with a sentence that says what to change.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fusion_passes.compiler.config import ENV_PREFIX, PassConfig, Profitability
from fusion_passes.fusions.builtin import FUSIONS
from fusion_passes.tools.table import paragraph, table

EPILOG = """\
exit status: 0; 1 where a required fusion was applied nowhere (explain) or something must be done (doctor);
2 where the command could not do its work
"""
BUILD = """
    def build():
        model = …
        return model, (x,), {}          # explain compiles model(x)
"""


class CommandError(Exception):
    """The command cannot do its work; the text says why, and what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.  Returns the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except CommandError as error:
        if getattr(arguments, "traceback", False) and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        print(f"fusion_passes: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fusion_passes",
        description="torch.compile passes that fuse FP8 quantization into the ops before it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    explain = commands.add_parser(
        "explain",
        help="what the passes do to a model, beside stock torch.compile",
        description="Compile a model stock and with the passes; show what was fused, what was not and why, how far the "
        "outputs are apart, and what it costs.",
        epilog=f"FILE defines build(), and may define CONFIG, a PassConfig or a dict of its settings:\n{BUILD}\n"
        "The command line goes before CONFIG, and CONFIG before the environment.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    explain.add_argument("file", metavar="FILE", type=Path, help="a Python file with a function build()")
    explain.add_argument(
        "--config",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a setting of PassConfig, such as level=O1 or attention_quant=required; once for each",
    )
    explain.add_argument(
        "--profitability",
        choices=[p.value for p in Profitability],
        help="ignore: fuse wherever it is legal, to look at the graph (chosen by itself where there is no GPU)",
    )
    explain.add_argument("--debug", metavar="DIR", type=Path, help="write the graphs before and after into DIR")
    explain.add_argument("--json", action="store_true", help="print JSON instead of text")
    explain.add_argument("--traceback", action="store_true", help="show the whole traceback of an error in FILE")
    explain.set_defaults(command=_explain)

    listing = commands.add_parser("list", help="the fusions, what each needs, and whether it is usable here")
    listing.set_defaults(command=_list)
    doctor = commands.add_parser("doctor", help="what this machine has, what is missing, and what to do about it")
    doctor.set_defaults(command=_doctor)
    return parser


def _explain(arguments: argparse.Namespace) -> int:
    from fusion_passes.compiler import inductor

    try:
        inductor.check_torch()
    except RuntimeError as error:
        raise CommandError(str(error)) from error
    file: Path = arguments.file
    module = _load(file)
    build = getattr(module, "build", None)
    if not callable(build):
        raise CommandError(f"{file} does not define a function build(); it must return what to compile:\n{BUILD}")
    config, chosen = _config(getattr(module, "CONFIG", None), arguments)
    _make_folder(config.debug_dir)
    model, args, kwargs = _built(build, file)
    if not chosen and not _on_gpu(model, args, kwargs):
        config = dataclasses.replace(config, profitability=Profitability.IGNORE)
        note = (
            "No GPU: no fused op is faster than stock torch.compile here, so by default nothing would be fused; this "
            'run rewrites with profitability="ignore", to show the graph (--profitability measured shows the default).'
        )
        print(paragraph(note, indent=0) + "\n", file=sys.stderr if arguments.json else sys.stdout, flush=True)

    from fusion_passes.tools.explain import explain

    try:
        explanation = explain(model, *args, kwargs=kwargs, config=config)
    except Exception as error:
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        raise CommandError(f"the model of {file} failed{notes}\n{_told(error, file)}") from error
    print(explanation.to_json() if arguments.json else explanation)
    if config.debug_dir is not None:
        print(f"graphs before and after: {config.debug_dir}", file=sys.stderr)
    if explanation.unmet:
        print(f"fusion_passes: required, and applied nowhere: {', '.join(explanation.unmet)}", file=sys.stderr)
        return 1
    return 0


def _load(file: Path) -> ModuleType:
    """The user's file as a module, imported as `python FILE` would find its neighbours."""
    if not file.is_file():
        raise CommandError(f"there is no file {file}: give the path of a Python file that defines build()")
    name = file.stem if file.stem.isidentifier() and file.stem not in sys.modules else f"explained_{abs(hash(file))}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise CommandError(f"{file} is no Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(file.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise CommandError(f"{file} cannot be imported\n{_told(error, file)}") from error
    return module


def _config(given: object, arguments: argparse.Namespace) -> tuple[PassConfig, bool]:
    """The settings, and whether somebody chose the profitability."""
    settings: dict[str, Any] = {}
    if arguments.debug is not None:
        settings["debug_dir"] = arguments.debug
    for item in arguments.config:
        key, equals, text = item.partition("=")
        if not equals:
            raise CommandError(f"--config {item}: write KEY=VALUE, e.g. level=O1")
        if key == "extra_fusions":
            raise CommandError("--config extra_fusions: rules are Python objects; set them in CONFIG of the file")
        settings[key] = text
    if arguments.profitability is not None:
        settings["profitability"] = arguments.profitability
    try:
        PassConfig.from_dict(settings)  # before it is mixed with others, for its error about unknown names
        config = PassConfig.from_env()
        chosen = "profitability" in settings or config.profitability is not Profitability.MEASURED
        if isinstance(given, PassConfig):
            config = given
            chosen = chosen or given.profitability is not Profitability.MEASURED
        elif isinstance(given, Mapping):
            PassConfig.from_dict(given)
            config = dataclasses.replace(config, **given)
            chosen = chosen or "profitability" in given
        elif given is not None:
            raise CommandError(f"CONFIG is a {type(given).__name__}: make it a PassConfig, or a dict of its settings")
        return dataclasses.replace(config, **settings), chosen
    except (TypeError, ValueError) as error:
        raise CommandError(str(error)) from error


def _make_folder(folder: Path | None) -> None:
    """Before anything is compiled, since its error would read as one of the model."""
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"the folder for graphs, {folder}, cannot be made ({error}): give another one") from error


def _built(build: Callable[[], Any], file: Path) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """What build() returns, checked."""
    try:
        result = build()
    except (Exception, SystemExit) as error:
        raise CommandError(f"build() of {file} failed\n{_told(error, file)}") from error
    if isinstance(result, tuple) and len(result) == 3:
        model, args, kwargs = result
        if callable(model) and isinstance(args, (tuple, list)) and isinstance(kwargs, Mapping):
            return model, tuple(args), dict(kwargs)
        found = f"({', '.join(type(item).__name__ for item in result)})"
    else:
        found = f"a {type(result).__name__}" + (f" of {len(result)}" if isinstance(result, (tuple, list)) else "")
    raise CommandError(
        f"build() of {file} must return (model, args, kwargs), a callable, a tuple and a dict; "
        f"it returned {found}:\n{BUILD}"
    )


def _on_gpu(model: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if isinstance(model, torch.nn.Module):
        tensors += [*model.parameters(), *model.buffers()]
    return any(tensor.device.type == "cuda" for tensor in tensors)


def _told(error: BaseException, file: Path) -> str:
    """An exception of the user's code in a few lines: where in `file`, and what."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == file.resolve()]
    lines = []
    if isinstance(error, SyntaxError) and error.filename:
        lines.append(f"at {error.filename}:{error.lineno}: {(error.text or '').strip()}")
    elif frames:
        lines.append(f"at {file}:{frames[-1].lineno}: {frames[-1].line}")
    text = str(error).strip().split("\n")
    lines.append(f"{type(error).__name__}: {text[0]}")
    lines += text[1:6]
    if len(text) > 6:
        lines.append("…")
    lines.append("(--traceback shows the whole traceback)")
    return "\n".join(f"  {line}".rstrip() for line in lines)


def _list(arguments: argparse.Namespace) -> int:
    from fusion_passes.tools import doctor as machine

    rows, kernels = [], []
    for rule in FUSIONS:
        behind = machine.kernels(rule)
        usable = any(not why for *_, why in behind) or not behind
        rows.append(
            [rule.name, ENV_PREFIX + rule.name.upper(), rule.level.name, "yes" if usable else "no", rule.summary]
        )
        kernels += [
            [rule.name, "no" if why else "yes", f"{name}: {needs}" + f"\n{why}" * bool(why)]
            for name, needs, why in behind
        ]
    print(table(["fusion", "environment variable", "level", "usable", "what it does"], rows, indent=0))
    print()
    print(table(["fusion", "usable", "kernel and what it needs"], kernels, indent=0))
    print()
    switches = (
        "Each fusion is a setting of PassConfig: on, off or required; left alone it follows the level (O0, O1, O2; the "
        "default is O2). On a CPU the fused ops run as plain torch, which is not faster: by default nothing is fused "
        "there."
    )
    print(paragraph(switches, indent=0))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from fusion_passes.tools import doctor as machine

    findings = machine.examine()
    rows = []
    for finding in findings:
        mark = "FIX" if finding.todo else "note" if finding.problem else "ok"
        text = finding.found
        text += f"\n{finding.problem}" * bool(finding.problem) + f"\ndo: {finding.todo}" * bool(finding.todo)
        rows.append([mark, finding.topic, text])
    for rule in FUSIONS:
        for name, _, why in machine.kernels(rule):
            rows.append(["note" if why else "ok", rule.name, f"{name}: {why or 'usable'}"])
    print(table(["", "", "found"], rows, indent=0))
    todo = sum(bool(finding.todo) for finding in findings)
    print("\n" + (f"{todo} to fix" if todo else "The passes can run here."))
    return 1 if todo else 0


def _main() -> int:
    """`main`, for a reader that may stop reading (`| head`): that is no failure."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is flushed at exit goes there
        return 0
    return status


if __name__ == "__main__":
    sys.exit(_main())
