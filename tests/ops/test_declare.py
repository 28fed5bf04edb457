"""The ops' contract with compiled code: their schemas, which do not change, and what is made from one declaration."""

import inspect
import sys
from typing import Literal

import pytest
import torch
from torch import SymInt, Tensor

from fusion_passes import ops
from fusion_passes.ops.declare import OPS, schema
from fusion_passes.ops.quantize import QuantizeArguments

BATCH = (
    "Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor query_start, Tensor seq_lens, "
    "Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None, Tensor? prob_scale=None, "
)
OPTIONS = (
    "*, float scale, int? window=None, float softcap=0., ScalarType? dtype=None, SymInt? max_query_len=None, "
    'str implementation="auto"'
)
SCHEMAS = {
    "attention_quant": (
        "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? output_scale, *, bool is_causal=False, "
        "float? scale=None, float output_scale_factor=1., bool output_scale_inverse=False, ScalarType dtype, "
        'str layout="bshd") -> Tensor'
    ),
    "kv_cache_write": (
        "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
        "Tensor? k_scale=None, Tensor? v_scale=None) -> ()"
    ),
    "paged_attention": f"({BATCH}Tensor? output_scale=None, Tensor? sinks=None, {OPTIONS}) -> Tensor",
    "paged_attention_group_quant": (
        f"({BATCH}Tensor? sinks=None, {OPTIONS}, int group_size=128, float? scale_lower_bound=None) -> (Tensor, Tensor)"
    ),
    "quantize_fp8": "(Tensor x, Tensor scale, ScalarType dtype) -> Tensor",
    "quantize_fp8_dynamic": (
        "(Tensor x, *, ScalarType dtype, str granularity, SymInt? group_size=None, float? scale_upper_bound=None, "
        "float? scale_lower_bound=None) -> (Tensor, Tensor)"
    ),
    "rms_norm_group_quant": (
        "(Tensor x, Tensor? weight=None, *, float eps, float weight_offset=0., int group_size, "
        "float? scale_lower_bound=None, float? scale_upper_bound=None, ScalarType dtype) -> (Tensor, Tensor)"
    ),
    "rms_norm_quant": (
        "(Tensor x, Tensor? weight=None, Tensor? scale=None, *, float eps, float weight_offset=0., "
        "float scale_factor=1., bool scale_inverse=False, ScalarType dtype) -> Tensor"
    ),
    "rope_quant_kv_write": (
        "(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, Tensor? positions, Tensor(a!) key_cache, "
        "Tensor(b!) value_cache, Tensor slot_mapping, Tensor? q_scale=None, Tensor? k_scale=None, "
        "Tensor? v_scale=None, *, int rotary_dim, bool interleaved=False, float q_scale_factor=1., "
        "bool q_scale_inverse=False, ScalarType? dtype=None) -> Tensor"
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema_and_tags(name):
    """What compiled code and saved graphs were made for."""
    op = getattr(torch.ops.fusion_passes, name).default
    assert str(op._schema) == f"fusion_passes::{name}{SCHEMAS[name]}"
    assert {*op.tags} == {torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides}


def test_every_op_has_its_schema_here():
    assert OPS.keys() == SCHEMAS.keys() == {*ops.__all__}


@pytest.mark.parametrize("name", ["attention_quant", "paged_attention_group_quant", "rope_quant_kv_write"])
def test_the_function_has_the_signature_and_the_help_of_its_arguments(name):
    function = getattr(ops, name)
    parameters = inspect.signature(function).parameters
    assert [*parameters] == [
        argument.name for argument in getattr(torch.ops.fusion_passes, name).default._schema.arguments
    ]
    assert "Returns" in function.__doc__
    assert getattr(sys.modules[function.__module__], function.__qualname__) is function


def test_defaults_that_the_schema_does_not_have_are_filled_in():
    """By position, by name, and traced."""
    q = torch.randn(1, 2, 3, 16)
    scale = torch.tensor(0.5)
    want = ops.attention_quant(q, q, q, None, scale, dtype=torch.float8_e4m3fn).view(torch.uint8)
    ways = (
        lambda q: ops.attention_quant(q, q, q, None, scale),
        lambda q: ops.attention_quant(query=q, key=q, value=q, output_scale=scale),
    )
    for way in ways:
        assert torch.equal(way(q).view(torch.uint8), want)
        assert torch.equal(torch.compile(way, backend="eager", fullgraph=True)(q).view(torch.uint8), want)


def test_types_and_defaults():
    def call(
        x: Tensor,
        y: Tensor | None,
        flag: bool = True,
        *,
        n: int | SymInt | None = None,
        name: Literal["a", "b"] = "a",
        dtype: torch.dtype = torch.int8,
        eps: float = 1e-05,
    ) -> tuple[Tensor, Tensor]: ...

    assert schema(inspect.signature(call), writes=("y",), given=("flag",)) == (
        '(Tensor x, Tensor(a!)? y, bool flag, *, SymInt? n=None, str name="a", ScalarType dtype, float eps=1e-05) '
        "-> (Tensor, Tensor)"
    )


@pytest.mark.parametrize("annotation", [list[Tensor], int | float, complex])
def test_types_that_a_schema_does_not_have(annotation):
    parameter = inspect.Parameter("x", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)
    with pytest.raises(TypeError, match="is no type of a schema; there are Tensor, bool"):
        schema(inspect.Signature([parameter], return_annotation=Tensor))


def test_a_write_to_an_argument_that_is_not_there():
    def call(x: Tensor) -> Tensor: ...

    with pytest.raises(TypeError, match="no argument is called cache, there are x"):
        schema(inspect.signature(call), writes=("cache",))


def test_arguments_by_name():
    x, scale = torch.ones(2), torch.tensor(0.5)
    arguments = QuantizeArguments(x, scale)
    assert arguments.by_name() == {"x": x, "scale": scale, "dtype": torch.float8_e4m3fn}
    assert arguments.by_name(without=("x", "dtype"), out=x) == {"scale": scale, "out": x}
