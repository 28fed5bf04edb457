"""The ops' contract with compiled code: their schemas, which do not change, and what is made from one declaration."""

import pytest
import torch

from fusion_passes import ops

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


def test_no_op_is_without_a_schema_here():
    assert {*dir(torch.ops.fusion_passes)} >= {*SCHEMAS}
    assert {*ops.__all__} <= {*SCHEMAS}
