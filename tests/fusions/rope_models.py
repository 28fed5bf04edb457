"""How models write rotary embedding: the ops in their order, from the projections to the keys that are written.

Each function takes query and key [batch, length, heads * head_dim], positions [batch, length] or [1, length], and where
it has a parameter `table` one of [LONGEST, rotary_dim], cosines beside sines.  It gives query and key
[tokens, heads, head_dim].
"""

import torch

HEAD_DIM, LONGEST = 32, 64


def heads_first(x):
    return x.view(*x.shape[:2], -1, HEAD_DIM).transpose(1, 2)


def heads_last(x):
    return x.view(*x.shape[:2], -1, HEAD_DIM)


def tokens_of(x, dim=1):
    """[tokens, heads, head_dim], from [batch, heads, length, head_dim] or with heads in dimension 2."""
    x = x.transpose(1, 2) if dim == 1 else x
    return x.reshape(-1, x.shape[2], HEAD_DIM)


def frequencies(dim):
    return 10.0 ** -torch.linspace(0, 1, dim // 2)


def angles_of(positions, dim):
    """[batch, length, dim / 2], as transformers computes them."""
    inv = frequencies(dim).to(positions.device)[None, :, None].expand(positions.shape[0], -1, 1)
    return (inv.float() @ positions[:, None, :].float()).transpose(1, 2)


def turned_halves(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def turned_pairs(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def llama(q, k, positions, unsqueeze=1, view=heads_first):
    """Transformers: Llama, Mistral, Qwen."""
    angles = angles_of(positions, HEAD_DIM)
    angles = torch.cat((angles, angles), -1)
    cos, sin = ((t * 1.0).to(q.dtype).unsqueeze(unsqueeze) for t in (angles.cos(), angles.sin()))
    return [tokens_of(x * cos + turned_halves(x) * sin, unsqueeze) for x in (view(q), view(k))]


def llama_heads_last(q, k, positions):
    return llama(q, k, positions, 2, heads_last)


def phi(q, k, positions):
    """Transformers: Phi, StableLM, Persimmon: the first dimensions."""
    angles = angles_of(positions, 16)
    angles = torch.cat((angles, angles), -1)
    cos, sin = (t.to(q.dtype).unsqueeze(1) for t in (angles.cos(), angles.sin()))
    out = []
    for x in (heads_first(q), heads_first(k)):
        turned, passed = x[..., :16], x[..., 16:]
        out.append(tokens_of(torch.cat((turned * cos + turned_halves(turned) * sin, passed), -1)))
    return out


def glm(q, k, positions):
    """Transformers: GLM, GLM-4, Helium: neighbours, the first dimensions."""
    angles = angles_of(positions, 16)
    angles = torch.cat((angles, angles), -1)
    cos, sin = (t.to(q.dtype).unsqueeze(1) for t in (angles.cos(), angles.sin()))
    cos, sin = (t[..., : t.shape[-1] // 2].repeat_interleave(2, dim=-1) for t in (cos, sin))
    out = []
    for x in (heads_first(q), heads_first(k)):
        turned, passed = x[..., :16], x[..., 16:]
        out.append(tokens_of(torch.cat((turned * cos + turned_pairs(turned) * sin, passed), -1)))
    return out


def ernie(q, k, positions):
    """Transformers: ERNIE 4.5: neighbours, in fp32 from tables that are not."""
    angles = angles_of(positions, HEAD_DIM)
    angles = torch.cat((angles, angles), -1)
    cos, sin = (t.to(q.dtype).unsqueeze(1) for t in (angles.cos(), angles.sin()))
    cos, sin = (t[..., : t.shape[-1] // 2].repeat_interleave(2, dim=-1) for t in (cos, sin))
    return [
        tokens_of((x.float() * cos + turned_pairs(x).float() * sin).to(x.dtype))
        for x in (heads_first(q), heads_first(k))
    ]


def cohere(q, k, positions):
    """Transformers: Cohere: neighbours in fp32."""
    angles = torch.repeat_interleave(angles_of(positions, HEAD_DIM), 2, dim=-1)
    cos, sin = (t.to(q.dtype).unsqueeze(1) for t in (angles.cos(), angles.sin()))
    out = []
    for x in (heads_first(q), heads_first(k)):
        dtype, x = x.dtype, x.float()
        out.append(tokens_of((x * cos + turned_pairs(x) * sin).to(dtype)))
    return out


def table_of(dim, dtype=torch.float32):
    angles = torch.outer(torch.arange(LONGEST).float(), frequencies(dim))
    return torch.cat((angles.cos(), angles.sin()), -1).to(dtype)


def gptj(q, k, positions, table):
    """Transformers: GPT-J, CodeGen: gathered from a table for each sequence, neighbours, the first dimensions."""
    table = table.repeat(positions.shape[0], 1, 1)
    index = positions.unsqueeze(-1).repeat(1, 1, table.shape[-1])
    sin, cos = torch.split(torch.gather(table, 1, index).flip(-1), table.shape[-1] // 2, dim=-1)
    cos, sin = (torch.repeat_interleave(t[:, :, None, :], 2, 3) for t in (cos, sin))
    out = []
    for x in (heads_last(q), heads_last(k)):
        turned, passed = x[..., :16], x[..., 16:]
        turned = turned * cos + turned_pairs(turned) * sin
        out.append(tokens_of(torch.cat((turned, passed), -1).permute(0, 2, 1, 3).to(q.dtype)))
    return out


def gpt_oss(q, k, positions):
    """Transformers: gpt-oss: halves, tables of half as many columns."""
    angles = angles_of(positions, HEAD_DIM)
    cos, sin = (t.to(q.dtype).unsqueeze(1) for t in (angles.cos(), angles.sin()))
    out = []
    for x in (heads_first(q), heads_first(k)):
        x1, x2 = torch.chunk(x, 2, dim=-1)
        out.append(tokens_of(torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)))
    return out


def halves_heads_last(q, k, positions, table):
    """Halves in [batch, length, heads, head_dim], looked up by position."""
    cos, sin = table[positions].unsqueeze(2).to(q.dtype).chunk(2, -1)
    out = []
    for x in (heads_last(q), heads_last(k)):
        x1, x2 = torch.chunk(x, 2, dim=-1)
        out.append(torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).flatten(0, 1))
    return out


def vllm(q, k, positions, table, neox=True, dim=HEAD_DIM):
    """vLLM, SGLang: rows of a table by index_select; what passes is there even if it is empty."""
    positions = positions.expand(q.shape[0], -1).flatten()
    cos, sin = table.index_select(0, positions).chunk(2, dim=-1)
    out = []
    for x in (q.flatten(0, 1), k.flatten(0, 1)):
        shape = x.shape
        x = x.view(x.shape[0], -1, HEAD_DIM)
        turned, passed = x[..., :dim], x[..., dim:]
        c, s = (t.unsqueeze(-2).to(x.dtype) for t in (cos, sin))
        x1, x2 = torch.chunk(turned, 2, -1) if neox else (turned[..., ::2], turned[..., 1::2])
        o1, o2 = x1 * c - x2 * s, x2 * c + x1 * s
        turned = torch.cat((o1, o2), -1) if neox else torch.stack((o1, o2), dim=-1).flatten(-2)
        out.append(torch.cat((turned, passed), -1).reshape(shape).view(shape[0], -1, HEAD_DIM))
    return out


def vllm_neighbours(q, k, positions, table):
    return vllm(q, k, positions, table, neox=False)


def vllm_partial(q, k, positions, table):
    return vllm(q, k, positions, table, dim=16)


def vllm_partial_neighbours(q, k, positions, table):
    return vllm(q, k, positions, table, neox=False, dim=16)


def meta(q, k, positions, table):
    """Meta's llama: complex numbers, a slice of the table, one row for all sequences."""
    turns = torch.view_as_complex(table.view(LONGEST, 2, -1).transpose(1, 2).contiguous())
    turns = turns[3 : 3 + q.shape[1]].view(1, q.shape[1], 1, -1)
    out = []
    for x in (heads_last(q), heads_last(k)):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        out.append(tokens_of(torch.view_as_real(pairs * turns).flatten(3).type_as(x), 2))
    return out


def meta_by_position(q, k, positions, table):
    """TorchTitan, Llama 4: complex numbers by position."""
    turns = torch.view_as_complex(table.view(LONGEST, 2, -1).transpose(1, 2).contiguous())
    turns = turns[positions][:, :, None, :]
    out = []
    for x in (heads_last(q), heads_last(k)):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        out.append(tokens_of(torch.view_as_real(pairs * turns).flatten(3).type_as(x), 2))
    return out


def pairs_table(table):
    return table.view(LONGEST, 2, -1).transpose(1, 2)


def torchtune(q, k, positions, table, by_position=True):
    """torchtune: a table of pairs."""
    rows = pairs_table(table).contiguous()
    rows = rows[positions] if by_position else rows[: q.shape[1]]
    rows = rows.view(-1, q.shape[1], 1, HEAD_DIM // 2, 2)
    out = []
    for x in (heads_last(q), heads_last(k)):
        pairs = x.float().reshape(*x.shape[:-1], -1, 2)
        y = torch.stack(
            [
                pairs[..., 0] * rows[..., 0] - pairs[..., 1] * rows[..., 1],
                pairs[..., 1] * rows[..., 0] + pairs[..., 0] * rows[..., 1],
            ],
            -1,
        )
        out.append(tokens_of(y.flatten(3).type_as(x), 2))
    return out


def torchtune_sliced(q, k, positions, table):
    return torchtune(q, k, positions, table, by_position=False)


def gpt_fast(q, k, positions, table):
    """gpt-fast, torchchat: one row of pairs for all sequences."""
    rows = pairs_table(table).contiguous()[positions[0]]
    out = []
    for x in (heads_last(q), heads_last(k)):
        pairs = x.float().reshape(*x.shape[:-1], -1, 2)
        r = rows.view(1, pairs.size(1), 1, pairs.size(3), 2)
        y = torch.stack(
            [
                pairs[..., 0] * r[..., 0] - pairs[..., 1] * r[..., 1],
                pairs[..., 1] * r[..., 0] + pairs[..., 0] * r[..., 1],
            ],
            -1,
        )
        out.append(tokens_of(y.flatten(3).type_as(x), 2))
    return out


def x_transformers(q, k, positions):
    """x-transformers: angles [length, dim] without dimensions for batch and heads, a factor, neighbours."""
    angles = torch.einsum("i,j->ij", positions[0].float(), frequencies(HEAD_DIM).to(q.device))
    angles = torch.stack((angles, angles), -1).flatten(-2)
    out = []
    for x in (heads_first(q), heads_first(k)):
        y = (x * angles.cos() * 1.0) + (_turned(x) * angles.sin() * 1.0)
        out.append(tokens_of(y.type(x.dtype)))
    return out


def x_transformers_batched(q, k, positions):
    """x-transformers: angles of each sequence."""
    angles = torch.einsum("bi,j->bij", positions.float(), frequencies(HEAD_DIM).to(q.device))
    angles = torch.stack((angles, angles), -1).flatten(-2)[:, None]
    out = []
    for x in (heads_first(q), heads_first(k)):
        y = (x * angles.cos() * 1.0) + (_turned(x) * angles.sin() * 1.0)
        out.append(tokens_of(y.type(x.dtype)))
    return out


def _turned(x):
    x1, x2 = x.reshape(*x.shape[:-1], -1, 2).unbind(dim=-1)
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


def litgpt(q, k, positions, table):
    """LitGPT: rows of two tables, [length, dim]."""
    cos, sin = (torch.cat((t, t), -1).index_select(0, positions[0]) for t in table.chunk(2, -1))
    return [tokens_of((x * cos + turned_halves(x) * sin).to(x.dtype)) for x in (heads_first(q), heads_first(k))]


def flat_between(q, k, positions, table):
    """Halves in [batch, length, heads, head_dim], which become [batch, length, hidden] before they are tokens."""
    cos, sin = table[positions].unsqueeze(2).to(q.dtype).chunk(2, -1)
    out = []
    for x in (heads_last(q), heads_last(k)):
        x1, x2 = torch.chunk(x, 2, dim=-1)
        turned = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).flatten(2)
        out.append(turned.reshape(-1, turned.shape[-1] // HEAD_DIM, HEAD_DIM))
    return out


def sliced(q, k, positions, table):
    """Tables of the longest sequence, sliced."""
    cos, sin = (torch.cat((t, t), -1)[: q.shape[1]].to(q.dtype)[None, :, None] for t in table.chunk(2, -1))
    return [tokens_of(x * cos + turned_halves(x) * sin, 2) for x in (heads_last(q), heads_last(k))]


def sliced_after_lookup(q, k, positions, table):
    """Doubled columns, looked up, of which the first half is taken."""
    cos, sin = (torch.cat((t, t), -1)[positions][:, :, None].to(q.dtype) for t in table.chunk(2, -1))
    cos, sin = (t[..., : HEAD_DIM // 2] for t in (cos, sin))
    out = []
    for x in (heads_last(q), heads_last(k)):
        x1, x2 = torch.chunk(x, 2, dim=-1)
        out.append(tokens_of(torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1), 2))
    return out


def sliced_rows_after_lookup(q, k, positions, table):
    """Rows are looked up for more tokens than there are."""
    longer = torch.cat((positions, positions), 1)
    cos, sin = table[longer][:, : q.shape[1], None].to(q.dtype).chunk(2, -1)
    out = []
    for x in (heads_last(q), heads_last(k)):
        x1, x2 = torch.chunk(x, 2, dim=-1)
        out.append(tokens_of(torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1), 2))
    return out


def deepseek(q, k, positions):
    """Neighbours are turned, halves come out."""
    angles = angles_of(positions, HEAD_DIM)
    cos, sin = (t.to(q.dtype).unsqueeze(1) for t in (angles.cos(), angles.sin()))
    out = []
    for x in (heads_first(q), heads_first(k)):
        x1, x2 = x[..., ::2], x[..., 1::2]
        out.append(tokens_of(torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)))
    return out


def modded(q, k, positions, table):
    """Turns the other way."""
    cos, sin = (t[: q.shape[1]].to(q.dtype)[None, :, None] for t in table.chunk(2, -1))
    out = []
    for x in (heads_last(q), heads_last(k)):
        x1, x2 = torch.chunk(x, 2, dim=-1)
        out.append(tokens_of(torch.cat((x1 * cos + x2 * sin, x1 * (-sin) + x2 * cos), -1), 2))
    return out


READ = (
    *(llama, llama_heads_last, phi, glm, ernie, cohere, gptj, gpt_oss, halves_heads_last, flat_between),
    *(vllm, vllm_neighbours, vllm_partial, vllm_partial_neighbours, meta, meta_by_position),
    *(torchtune, torchtune_sliced, gpt_fast, x_transformers, x_transformers_batched, litgpt),
    *(sliced, sliced_after_lookup, sliced_rows_after_lookup),
)
"""What becomes one kernel with the write."""
