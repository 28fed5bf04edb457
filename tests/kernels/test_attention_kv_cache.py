"""The models over a KV cache on the kernels of paged attention, as the op launches them: a card, or the interpreter."""

import pytest
import torch

from fusion_passes.nn import backends
from fusion_passes.ops.paged_attention import PagedAttentionArguments
from fusion_passes.quant import codes, dequantize
from tests.kernels.paged import by_kernels
from tests.models.attention_kv_cache import AttentionKVCacheFp8StaticQuantFusedModel as Fused
from tests.models.attention_kv_cache import AttentionKVCacheFp8StaticQuantPatternModel as Model

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = ((3, 3), (1, 21), (0, 0), (20, 37), (1, 1))


class Kernels(backends.Triton):
    """Never the op's CPU form."""

    name = "kernels"

    @classmethod
    def attend(cls, call):
        scales = (call.q_scale, call.k_scale, call.v_scale, call.prob_scale, call.output_scale, call.sinks)
        assert call.group_size is None
        return by_kernels(PagedAttentionArguments(*call.batch, *scales, **call.options, dtype=call.dtype))


@torch.no_grad()
@pytest.mark.parametrize(
    ("kv_cache_dtype", "dtype", "options"),
    [
        ("fp8_e4m3", torch.bfloat16, {"rope": True}),
        ("fp8_e5m2", torch.float16, {"window": 9, "softcap": 3.0}),
        ("auto", torch.bfloat16, {"quantize": "opaque"}),
    ],
)
def test_models_on_the_kernels(kv_cache_dtype, dtype, options):
    options = {"kv_cache_dtype": kv_cache_dtype, "dtype": dtype, "block_size": 16, "device": DEVICE, **options}
    results = []
    for model_type, backend in ((Model, "sdpa"), (Model, None), (Fused, None)):
        model = model_type(4, 1, 32, backend=backend or "auto", **options)
        if backend is None:
            model.attention.backend = Kernels
        _, got = model(*model.example_inputs(LENGTHS, 4), return_codes=True)
        results.append(got)
    expected, unfused, fused = results
    for got in (unfused, fused):
        # One step of FP8; near 0, where steps are tiny, the rounding of the probabilities.
        values = (dequantize(x, model.output_scale) for x in (got, expected))
        torch.testing.assert_close(*values, rtol=1 / 8, atol=torch.finfo(dtype).eps)
        assert (codes(got) != codes(expected)).float().mean() < 0.1
    assert (codes(fused) - codes(unfused)).abs().max() <= 1
