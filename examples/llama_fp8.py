"""An unmodified Hugging Face Llama with static FP8 linear layers, random weights and a real text.

    python -m fusion_passes explain examples/llama_fp8.py      what the passes do to its graph
    python examples/llama_fp8.py                               next-byte loss in bf16 and in FP8, eagerly

`explain` takes any file with a function `build() -> (model, args, kwargs)`: it compiles `model(*args, **kwargs)`.

A compiled transformers model builds its mask as a tensor and repeats keys and values up to the query heads, even where
the mask is plainly causal, since it cannot look at values while it is traced (seen in 5.17). `build("sdpa_causal")`
is the same model told through transformers' own AttentionInterface that there is no padding and nothing is packed: SDPA
then gets `is_causal=True` and the few key and value heads.
"""

import copy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fusion_passes.nn import calibrate, quantize_

TEXT = Path(__file__).with_name("calibration_text.txt")
SEQ = 256

# An attention function without a mask function of the same name: transformers then makes no mask.
AttentionInterface.register("sdpa_causal", sdpa_attention_forward)


def build(attention: str = "sdpa") -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The FP8 model and its inputs, on the GPU if there is one. attention: "sdpa" or "sdpa_causal".

    On a CPU 4 layers, hidden 256, 4 heads over 2, head size 64; on a GPU 8 layers, hidden 4096, 32 heads over 8, head
    size 128.
    """
    tokens = batches()
    model = to_fp8(llama(tokens.device, attention), tokens)
    return model, (), {"input_ids": tokens, "use_cache": False}


def llama(device: torch.device, attention: str = "sdpa") -> LlamaForCausalLM:
    """A bf16 model whose vocabulary is the 256 bytes; the same weights on every call."""
    if device.type == "cuda":
        size = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=8, num_attention_heads=32)
        size |= dict(num_key_value_heads=8, head_dim=128)
    else:
        size = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4)
        size |= dict(num_key_value_heads=2, head_dim=64)
    config = LlamaConfig(vocab_size=256, max_position_embeddings=SEQ, attn_implementation=attention, **size)
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(device, torch.bfloat16).eval().requires_grad_(False)


def batches() -> Tensor:
    """The text as byte values, int64 [batch, SEQ], the incomplete last row left out."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = torch.tensor(list(TEXT.read_bytes()), device=device)
    return tokens[: len(tokens) // SEQ * SEQ].view(-1, SEQ)


def to_fp8(model: LlamaForCausalLM, tokens: Tensor) -> LlamaForCausalLM:
    """Swap every linear layer but the head for FP8Linear, in place, calibrated on tokens."""
    scales = calibrate(model, lambda: model(tokens, use_cache=False), filter=lambda name, _: name != "lm_head")
    quantize_(model, scales)
    return model


@torch.no_grad()
def loss(model: LlamaForCausalLM, tokens: Tensor) -> float:
    """Mean cross entropy of each next byte, in nats."""
    logits = model(tokens, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten()).item()


def main() -> None:
    tokens = batches()
    model = llama(tokens.device)
    fp8 = to_fp8(copy.deepcopy(model), tokens)
    print(f"next-byte loss of {tokens.numel()} bytes (random weights: ln 256 = 5.545)")
    print(f"  bf16  {loss(model, tokens):.4f}")
    print(f"  FP8   {loss(fp8, tokens):.4f}")


if __name__ == "__main__":
    main()
