# SPDX-License-Identifier: Apache-2.0
"""Every family that AutoModelForCausalLM builds, tiny and with random weights, through kvkeep.hf.attach: the logits of
generate() under `full` must be those of the model alone, or attach() must refuse by name.

    python families.py                 a table of all families
    python families.py llama gpt_oss   those
    python families.py --markdown      for docs/reference/python.md

Exit status 1 if a family differs, or fails with an error that is not kvkeep's. test_families.py runs a few of them.
"""

import argparse
import contextlib
import inspect
import io
import sys
import warnings

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import kvkeep
import kvkeep.hf as hf

VOCAB, LAYERS = 97, 4
#: What is set where a config has it. Values that a family wants otherwise are below.
SMALL = dict(
    vocab_size=VOCAB, hidden_size=64, d_model=64, n_embd=64, dim=64, intermediate_size=96, ffn_dim=96, n_inner=96,
    d_ff=96, ffn_hidden_size=96,
    num_hidden_layers=LAYERS, n_layer=LAYERS, num_layers=LAYERS, n_layers=LAYERS, decoder_layers=LAYERS,
    encoder_layers=2,
    num_attention_heads=4, n_head=4, n_heads=4, attention_heads=4, decoder_attention_heads=4, encoder_attention_heads=4,
    num_key_value_heads=2, num_kv_heads=2,
    head_dim=16, kv_channels=16, max_position_embeddings=4096, n_positions=4096, n_ctx=4096, max_seq_len=4096,
    rotary_dim=8,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, sliding_window=16, attention_chunk_size=16, window_size=16,
    tie_word_embeddings=False,
    num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
    moe_intermediate_size=32, moe_num_experts=4, moe_k=2, moe_topk=2,
    shared_expert_intermediate_size=32, n_group=1, topk_group=1, num_expert_groups=1, first_k_dense_replace=1,
    moe_layer_start_index=1,
    kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, qk_head_dim=24,
    mamba_d_state=8, mamba_d_conv=4, mamba_expand=2, mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1,
    mamba_chunk_size=8, mamba_d_ssm=128, mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=8, state_size=8,
    conv_kernel=4, n_groups=1, chunk_size=8, expand=2, time_step_rank=8, mamba_dt_rank=8,
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16, lru_width=64,
    attention_window_size=16, image_size=32, patch_size=8, depth=2, embed_dim=64, num_channels=3, hidden_dim=64,
    n_audio_state=64,
    vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8, global_head_dim=32, num_nextn_predict_layers=0,
    index_n_heads=2, index_head_dim=16, index_topk=8,
)  # fmt: skip
HALF = ["sliding_attention", "full_attention"] * 2
OTHERWISE = {
    "bamba": dict(attn_layer_indices=[1, 3]),
    "cpmant": dict(dim_head=16, dim_ff=96),
    "ctrl": dict(dff=96),
    "falcon": dict(alibi=False, new_decoder_architecture=False),
    "gemma2": dict(attn_logit_softcapping=5.0),
    "gemma3n_text": dict(
        layer_types=HALF,
        num_kv_shared_layers=0,
        activation_sparsity_pattern=[0.0] * 4,
        laurel_rank=8,
        altup_num_inputs=2,
    ),
    "gpt_neo": dict(attention_types=[[["global", "local"], 2]]),
    "granitemoehybrid": dict(layer_types=["mamba", "attention"] * 2),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "minicpm3": dict(head_dim=24),
    "mpt": dict(max_seq_len=256),
    "xlstm": dict(num_heads=4),
}
#: Families in another form: (model_type, arguments).
VARIANTS = {
    "gemma3n_text, shared": (
        "gemma3n_text",
        OTHERWISE["gemma3n_text"]
        | dict(
            num_hidden_layers=6,
            layer_types=[*HALF, *HALF[:2]],
            num_kv_shared_layers=2,
            activation_sparsity_pattern=[0.0] * 6,
        ),
    ),
    "gemma4_text, shared": (
        "gemma4_text",
        dict(num_hidden_layers=6, layer_types=[*HALF, *HALF[:2]], num_kv_shared_layers=2),
    ),
    "llama, llama3": (
        "llama",
        dict(
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=1e4,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            )
        ),
    ),
    "llama, yarn": (
        "llama",
        dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)),
    ),
    "llama, dynamic": ("llama", dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=4.0))),
    "phi3, longrope": (
        "phi3",
        dict(
            original_max_position_embeddings=512,
            rope_parameters=dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 8, long_factor=[2.0] * 8),
        ),
    ),
    "falcon, alibi": ("falcon", dict(alibi=True)),
}


def small(config_class, also=None):
    """Arguments that make a config small, those of its parts included."""
    default = config_class()
    names = set(inspect.signature(config_class.__init__).parameters) | set(getattr(config_class, "attribute_map", {}))
    for base in config_class.__mro__:
        names |= set(getattr(base, "__annotations__", {}))
    slides = lambda k: k not in ("sliding_window", "attention_chunk_size") or getattr(default, k, None) is not None
    wanted = {k: v for k, v in SMALL.items() if k in names and slides(k)}
    if "qk_rope_head_dim" in wanted:  # latent attention: as many KV heads as query heads
        wanted.pop("head_dim", None)
        wanted["num_key_value_heads"] = 4
    if (
        "layer_types" in names
        and "layer_types" not in getattr(config_class, "attribute_map", {})
        and getattr(default, "layer_types", None)
    ):
        kinds = list(dict.fromkeys(default.layer_types))  # the kinds of the family, each at least once
        wanted["layer_types"] = (kinds * LAYERS)[:LAYERS]
    for part in getattr(config_class, "sub_configs", {}):
        if (inner := getattr(default, part, None)) is not None:
            wanted[part] = small(type(inner)) | ({"model_type": inner.model_type} if inner.model_type else {})
            if "vision" in part or "audio" in part:
                wanted[part].pop("vocab_size", None)
    return wanted | (also or {})


def tiny(kind):
    """A model of a family. Raises what transformers raises for a family that cannot be built small."""
    kind, also = VARIANTS.get(kind, (kind, OTHERWISE.get(kind)))
    config_class = CONFIG_MAPPING[kind]
    wanted = small(config_class, also)
    with torch.device("meta"):
        size = sum(
            p.numel() for p in transformers.AutoModelForCausalLM.from_config(config_class(**wanted)).parameters()
        )
    if size > 2e7:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**wanted)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sink" in name:
                parameter.normal_(2.0, 1.0)
            elif parameter.dim() >= 2:
                parameter.normal_(0, 0.12)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
    return model


def text(tokens, rows):
    return torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(1))


def generate(model, ids, mask):
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=12,
        do_sample=False,
        use_cache=True,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
    )
    return torch.stack(out.logits)


def outcome(kind):
    """(verdict, what it rests on): same, refused, DIFFERS, ERROR, or not built."""
    try:
        model, ids = tiny(kind), text(40, 2)
        mask = torch.ones_like(ids)
        padded, pads = ids.clone(), mask.clone()
        padded[1, :7], pads[1, :7] = 0, 0
        alone = [generate(model, ids, mask), generate(model, padded, pads)]
    except Exception as error:
        return "not built", f"{type(error).__name__}: {error}".splitlines()[0][:110]
    try:
        attached = hf.attach(model, "full")
        with attached:
            under = [generate(model, ids, mask), generate(model, padded, pads)]
        with hf.attach(model, "tova,budget=24,interval=4,prefill=cut,recent=4") as kept:
            generate(model, ids, mask)
    except kvkeep.Unsupported as error:
        return "refused", str(error).removeprefix("kvkeep.hf: ")
    except Exception as error:
        return "ERROR", f"{type(error).__name__}: {error}".splitlines()[0][:160]
    apart = max(float((a - b).abs().max()) / max(float(a.std()), 1e-9) for a, b in zip(alone, under))
    if not apart < 1e-3:
        return "DIFFERS", f"logits by {apart:.2g} of their spread"
    if not kept.events:
        return "ERROR", "no event came"
    spec, full = kept.keeper.spec, kept.keeper.spec.full_layers
    ropes = {spec.rope(l).style if spec.rope(l).stated else "open" for l in full}
    return "same", f"{len(full)} of {spec.num_layers} layers cut; RoPE {', '.join(sorted(ropes))}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*", help="model_type of transformers; none: all of AutoModelForCausalLM")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    kinds = arguments.family or sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS])
    counts, bad = {}, 0
    if arguments.markdown:
        print("| family | verdict | |\n|---|---|---|")
    for kind in kinds:
        with contextlib.redirect_stdout(io.StringIO()):
            verdict, why = outcome(kind)
        counts[verdict] = counts.get(verdict, 0) + 1
        bad += verdict in ("DIFFERS", "ERROR")
        print(
            f"| {kind} | {verdict} | {why} |" if arguments.markdown else f"{kind:26s} {verdict:10s} {why}", flush=True
        )
    print(
        f"{'' if arguments.markdown else chr(10)}{len(kinds)} families of transformers {transformers.__version__}: "
        + ", ".join(f"{n} {v}" for v, n in sorted(counts.items()))
    )
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
