"""What the tensors of quantized checkpoints mean, written from the libraries' own definitions: words, tables, blocks.

Each reader gives fp32 values [N, K]. They were compared bit for bit with AutoAWQ, bitsandbytes 0.50, compressed-tensors
0.20 and gpt-oss; the library under test is not imported here.
"""

from __future__ import annotations

import torch

F32 = torch.float32
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=F32)
AWQ_POSITION = [0, 4, 1, 5, 2, 6, 3, 7]  # logical column c of a word sits in this nibble


def nibbles(words):  # int32 [...] -> [..., 8], nibble j is bits 4j..4j+3
    return (words.unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15


def gptq(qweight, qzeros, scales, g_idx, *, v1):
    rows, columns = qweight.shape[0] * 8, qweight.shape[1]
    q = nibbles(qweight).permute(0, 2, 1).reshape(rows, columns)  # input 8i + j
    z = nibbles(qzeros).reshape(qzeros.shape[0], columns)  # output 8i + j
    if v1:
        z = z + 1
    g = g_idx.long()
    return ((q - z[g]).to(F32) * scales.to(F32)[g]).t()


def awq(qweight, qzeros, scales, group):
    rows, columns = qweight.shape[0], qweight.shape[1] * 8
    q = nibbles(qweight)[..., AWQ_POSITION].reshape(rows, columns)
    z = nibbles(qzeros)[..., AWQ_POSITION].reshape(-1, columns)
    return ((q - z.repeat_interleave(group, 0)).to(F32) * scales.to(F32).repeat_interleave(group, 0)).t()


def compressed_tensors(weight_packed, weight_scale, shape, group, zero=None):
    rows, columns = shape
    q = nibbles(weight_packed).reshape(rows, -1)[:, :columns] - 8
    z = 0
    if zero is not None:
        z = (nibbles(zero).permute(0, 2, 1).reshape(-1, zero.shape[1])[:rows] - 8).repeat_interleave(group, 1)
    return (q - z).to(F32) * weight_scale.to(F32).repeat_interleave(group, 1)


def hqq(W_q, scale, zero, shape):  # rows 0..R/2-1 in the high nibble
    q = torch.cat([W_q >> 4, W_q & 15], 0).to(F32)
    return ((q - zero.to(F32)) * scale.to(F32)).reshape(shape)


def mxfp4(blocks, scales):  # [..., G, 16], [..., G]; low nibble first
    value = torch.stack([E2M1[(blocks & 15).long()], E2M1[(blocks >> 4).long()]], -1).flatten(-2)
    return torch.ldexp(value, scales.to(torch.int32).unsqueeze(-1) - 127).flatten(-2)


def nvfp4(packed, scale, factor):
    value = torch.stack([E2M1[(packed & 15).long()], E2M1[(packed >> 4).long()]], -1).flatten(-2)
    return value * (scale.to(F32) * factor).repeat_interleave(16, 1)


def fp8_blocks(weight, scale_inv):
    rows, columns = weight.shape
    return weight.to(F32) * scale_inv.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
