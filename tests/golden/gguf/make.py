# SPDX-License-Identifier: Apache-2.0
"""Makes blocks.gguf, a tensor of random blocks of each type, and widened.safetensors.

    pip install gguf==0.19.0 ml_dtypes && python make.py

The latter is what the Python package gguf makes of them, also as f16 and bf16.
"""

import json
import pathlib
import struct

import gguf
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGML_QUANT_SIZES

HERE = pathlib.Path(__file__).parent
# Where the f16 scales of a block stand, by bytes.
SCALES = {
    Type.Q4_0: [0],
    Type.Q4_1: [0, 2],
    Type.Q5_0: [0],
    Type.Q5_1: [0, 2],
    Type.Q8_0: [0],
    Type.Q4_K: [0, 2],
    Type.Q5_K: [0, 2],
    Type.Q6_K: [208],
}
# Zeros, the least and the largest subnormal, the least and the largest normal number, of both signs.
EXTREME = np.array([0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x8400, 0x7BFF, 0xFBFF], np.uint16)


def blocks_of(kind, count, random):
    """Random bits, with finite scales: in every second block from the extremes, in the others of common size."""
    blocks = random.integers(0, 256, (count, GGML_QUANT_SIZES[kind][1]), np.uint8)
    for at in SCALES[kind]:
        scales = (random.standard_normal(count) * 0.02).astype(np.float16).view(np.uint16)
        scales[::2] = random.choice(EXTREME, len(scales[::2]))
        blocks[:, at : at + 2] = scales.reshape(-1, 1).view(np.uint8)
    return blocks


def plain(dtype, random):
    """Common numbers, those whose rounding to 16 bits is a tie, subnormal ones and the largest."""
    values = random.standard_normal(256).astype(np.float32)
    values[:16] = [
        0,
        -0.0,
        1 + 2**-11,
        1 + 3 * 2**-11,
        1 + 2**-8,
        1 + 3 * 2**-8,
        65504,
        65519.996,
        65520,
        -1e38,
        3.4028235e38,
        2**-24,
        2**-25,
        1e-40,
        -(2**-126),
        2**-149,
    ]
    return values.astype(dtype).reshape(4, 64)


def write_safetensors(path, tensors):
    names = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(ml_dtypes.bfloat16): "BF16"}
    header, data = {}, b""
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + tensor.nbytes],
        }
        data += tensor.tobytes()
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def main():
    random = np.random.default_rng(16)
    writer = gguf.GGUFWriter(HERE / "blocks.gguf", "test")
    writer.add_string("words", "größe\0inside")
    writer.add_array("tokens", ["a", "", "Ġthe", "<|end|>"])
    writer.add_array("scores", [0.5, -1.25, 3.0])
    writer.add_array("kinds", [1, -2, 3])
    writer.add_bool("yes", True)
    writer.add_float32("epsilon", 1e-5)
    writer.add_float64("wide", 0.1)
    writer.add_uint8("small", 255)
    writer.add_int32("below", -7)
    writer.add_uint64("large", 2**64 - 1)

    kept = {}
    with np.errstate(over="ignore"):
        kept["F32"] = plain(np.float32, random)
        kept["F16"] = plain(np.float16, random)
        kept["F16"][~np.isfinite(kept["F16"])] = 65504
        kept["BF16"] = plain(ml_dtypes.bfloat16, random)
        writer.add_tensor("F32", kept["F32"])
        writer.add_tensor("F16", kept["F16"])
        writer.add_tensor("BF16", kept["BF16"].view(np.uint8), raw_dtype=Type.BF16)
        for kind in SCALES:
            values, _ = GGML_QUANT_SIZES[kind]
            kept[kind.name] = blocks_of(kind, 12, random).reshape(3 if values == 256 else 2, 2, -1)
            writer.add_tensor(kind.name, kept[kind.name], raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

        widened = {}
        for name, stored in kept.items():
            bits = stored.view(np.uint8) if name == "BF16" else stored
            wide = np.ascontiguousarray(gguf.quants.dequantize(bits, Type[name]), np.float32)
            widened[name] = wide
            widened[name + ".f16"] = wide.astype(np.float16)
            widened[name + ".bf16"] = wide.astype(ml_dtypes.bfloat16)
    write_safetensors(HERE / "widened.safetensors", widened)


main()
