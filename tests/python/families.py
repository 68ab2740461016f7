# SPDX-License-Identifier: Apache-2.0
"""Every family that AutoModelForCausalLM builds, tiny and with random weights, through kvkeep.hf.attach: the logits of
generate() under `full` are those of the model alone, policies keep what they keep in a reference that masks what was
dropped (reference.py), and prompts in pieces, drafts and padded batches change nothing; or attach() refuses by name.

    python families.py                            all families
    python families.py llama gpt_oss              those
    python families.py --family 'gemma|deepseek'  those that it matches
    python families.py --trials full --markdown   one trial, and the table of docs/reference/python.md

Exit status 1 if a family differs, or fails with an error that is not kvkeep's. test_families.py runs a few of them.
"""

import argparse
import contextlib
import inspect
import io
import re
import sys
import warnings
from collections import Counter
from functools import partial

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import kvkeep
import kvkeep.hf as hf
from reference import BY_HAND, OPTIONS, Reference, under_reference

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
    "gemma2": dict(attn_logit_softcapping=1.5, query_pre_attn_scalar=4),
    "gemma3n_text": dict(
        layer_types=HALF,
        num_kv_shared_layers=0,
        activation_sparsity_pattern=[0.0] * 4,
        laurel_rank=8,
        altup_num_inputs=2,
    ),
    "gpt_neo": dict(attention_types=[[["global", "local"], 2]]),
    "granitemoehybrid": dict(layer_types=["mamba", "attention"] * 2),
    "inkling2_text": dict(unpadded_vocab_size=VOCAB),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "lfm2": dict(layer_types=["conv", "full_attention"] * 2),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"] * 2),
    "longcat_flash": dict(head_dim=8, num_layers=2, expert_ffn_hidden_size=32, ffn_hidden_size=96),
    "minicpm3": dict(head_dim=24),
    "mpt": dict(max_seq_len=256),
    "vaultgemma": dict(attn_logit_softcapping=1.5, query_pre_attn_scalar=4),
    "xlstm": dict(num_heads=4),
    "zamba2": dict(layers_block_type=["linear_attention", "hybrid"] * 2, attention_head_dim=32, num_key_value_heads=4),
    "zaya": dict(num_experts_per_tok=1),
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
    "ministral, half of its layers full": ("ministral", dict(layer_types=HALF)),
    "mistral, without a window": ("mistral", dict(sliding_window=None)),
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
    "mistral4": ("mistral4", dict()),  # which AutoModelForCausalLM does not know
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
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        make = transformers.AutoModelForCausalLM.from_config
    else:
        make = getattr(transformers, config_class.__name__.removesuffix("Config") + "ForCausalLM")
    with torch.device("meta"):
        size = sum(p.numel() for p in make(config_class(**wanted)).parameters())
    if size > 2e7:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    model = make(config_class(**wanted)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sink" in name:
                parameter.normal_(2.0, 1.0)
            elif name.endswith("q_norm.weight"):  # attention that is not all on one token, where nothing else scales it
                parameter.mul_(0.1)
            elif parameter.dim() >= 2:
                parameter.normal_(0, 0.12)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
    return model


def text(tokens, rows=1):
    return torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(1))


def generate(model, ids, mask=None, new=12, **more):
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        max_new_tokens=new,
        do_sample=False,
        use_cache=True,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
        **more,
    )


def apart(ours, theirs):
    """How far logits differ, in parts of their spread."""
    return max(float((a - b).abs().max()) / max(float(b.std()), 1e-9) for a, b in zip(ours, theirs))


# ---- Trials of a model. Each returns what is wrong, or None


def under_full(model):
    """generate() under `full` computes what it computes alone, with and without padding."""
    ids = text(120, 2)
    mask = torch.ones_like(ids)
    padded, pads = ids.clone(), mask.clone()
    padded[1, :7], pads[1, :7] = 0, 0
    both = [(ids, mask), (padded, pads)]
    try:
        alone = [torch.stack(generate(model, *one).logits) for one in both]
    except Exception as error:
        raise NotBuilt(f"{type(error).__name__}: {error}".splitlines()[0][:110]) from error
    with hf.attach(model, "full"):
        far = apart([torch.stack(generate(model, *one).logits) for one in both], alone)
    return None if far < 1e-3 else f"logits differ by {far:.2g} of their spread"


def kept_slots(model, name, more=""):
    """A policy keeps of a prompt, an answer, a second turn and its answer, in four events, what the reference keeps."""
    policy, steps = f"{name},{OPTIONS}{more}", text(157).split([120, *[1] * 9, 16, *[1] * 12], 1)
    argument = hf.cache_name(hf.decoder_of(model))
    with torch.no_grad():
        try:
            attached = hf.attach(model, policy, check=False)
        except kvkeep.InvalidArgument as error:  # as it should be
            return next((why for words, why in REFUSALS.items() if words in str(error)), str(error))
        with attached as kept:
            cache, spec = kept.cache(), kept.keeper.spec
            ours = [model(ids, use_cache=True, **{argument: cache}).logits[:, -1] for ids in steps]
            id, heads = hf._rows_of(cache).ids[0], range(spec.kv_heads)
            held = {l: [kept.keeper.positions(id, l, h).tolist() for h in heads] for l in spec.full_layers}
        reference = Reference(model, spec, hf._plain_cache(model), BY_HAND.get(name, policy))
        with under_reference(model):
            theirs, cuts = [], 0
            for n, ids in enumerate(steps):
                cuts += n > 0 and reference.cut(n == 1)
                theirs.append(reference.step(ids, **{argument: reference.cache})[:, -1])
    if len(kept.events) != cuts or cuts < 4:
        return f"{len(kept.events)} events, and {cuts} in the reference"
    other = sum(len(set(a) - set(b)) for l in held for a, b in zip(held[l], reference.held[l]))
    if other:
        return f"{other} of {sum(len(row) for rows in held.values() for row in rows)} slots are not the reference's"
    far = apart(ours, theirs)
    return None if far < 1e-3 else f"logits differ by {far:.2g} of their spread from the reference"


def told(model, ids, mask=None, **more):
    """Tokens, events and slots of a generate() under TOVA."""
    with hf.attach(model, f"tova,{OPTIONS}", check=False) as kept:
        cache = kept.cache()
        out = generate(model, ids, mask, 20, **{hf.cache_name(hf.decoder_of(model)): cache}, **more).sequences
        rows = [(l, h) for l in kept.keeper.spec.full_layers for h in range(kept.keeper.spec.kv_heads)]
        held = [[kept.keeper.positions(id, *row).tolist() for row in rows] for id in hf._rows_of(cache).ids]
        return out, [(e.logical_length, e.slots_after) for e in kept.events], held


def alone(model, ids, **more):
    """The text of the model alone; None: it cannot be asked so."""
    try:
        return generate(model, ids, new=20, **more).sequences
    except Exception:
        return None


def pieces(model):
    """A prompt that comes in pieces keeps what it keeps in one."""
    ids, more = text(120), dict(prefill_chunk_size=48)
    if alone(model, ids, **more) is None or not torch.equal(alone(model, ids, **more), alone(model, ids)):
        return NO_SUCH
    (out, events, held), (whole, points, slots) = told(model, ids, **more), told(model, ids)
    return None if torch.equal(out, whole) and events == points and held == slots else "another text, or other slots"


def drafts(model):
    """Prompt lookup writes the model's text under `full`, and runs to the end under TOVA."""
    ids, more = text(30).repeat(1, 4), dict(prompt_lookup_num_tokens=5)
    text_alone = alone(model, ids)
    if alone(model, ids, **more) is None or not torch.equal(alone(model, ids, **more), text_alone):
        return NO_SUCH
    with hf.attach(model, "full", check=False):
        out = generate(model, ids, new=20, **more).sequences
    if not torch.equal(out, text_alone):
        return "another text under full"
    out, events, held = told(model, ids, **more)
    if out.shape[1] != 140 or len(events) < 2 or max(map(len, held[0])) > 40 + 8 + 6:
        return f"{out.shape[1]} tokens, {len(events)} events, rows of {max(map(len, held[0]))} slots"
    return None


def batch(model):
    """A sequence that is padded on the left keeps what it keeps alone."""
    ids, mask = text(120, 2), torch.ones(2, 120, dtype=torch.long)
    ids[1, :9] = mask[1, :9] = 0
    padded = generate(model, ids, mask, 20).sequences
    if not torch.equal(padded[1:, 9:], generate(model, ids[1:, 9:], None, 20).sequences):
        return NO_SUCH
    out, _, held = told(model, ids, mask)
    first, second = told(model, ids[:1]), told(model, ids[1:, 9:])
    same = torch.equal(out[:1], first[0]) and torch.equal(out[1:, 9:], second[0]) and held == [*first[2], *second[2]]
    return None if same else "another text than alone, or other slots"


class NotBuilt(Exception):
    """transformers itself cannot."""


NO_SUCH = "not with the model alone"
REFUSALS = {"RoPE": "RoPE is open", "logit_cap": "logits are capped"}
TRIALS = {
    "full": under_full,
    **{f"slots, {name}": partial(kept_slots, name=name, more=more) for name, more in
       {"tova": "", "keydiff": "", "ams-tova": "", "expected": "", "adakv-expected": "",
        "pyramidkv-snapkv": ",window=4"}.items()},
    "pieces": pieces,
    "drafts": drafts,
    "batch": batch,
}  # fmt: skip


NO_CACHE = "no cache, or one that is not a `DynamicCache`"
#: Words of a refusal, and the row of the table that it belongs to.
REASONS = {
    "does not come through": "attention that is not given to the interface, or not over the cache's keys",
    "attends to other": "values or keys that the cache does not hold",
    "later tokens": "attention that sees later tokens (encoders)",
    "no layer with full attention": "no layer with full attention",
    "no eager attention": "sinks or a cap, and no eager attention",
    "sinks that follow": "sinks that follow from the text",
    "bias by position": "a bias by position",
    "indexer": "tokens chosen by an indexer",
    "a cache of type": "caches of another kind: indexers, compressed",
    "takes no cache": NO_CACHE,
    "the cache is a": NO_CACHE,
    "does not run a": NO_CACHE,
    "mask of": "masks of each head or layer",
    "that are alike": "full layers that differ from one another",
}


def group(model, spec):
    """What a family's layers are, for the table."""
    layers, decoder = hf._plain_cache(model).layers, hf.decoder_of(model)
    full = set(spec.full_layers)
    names = [type(layer).__name__ for layer in layers]
    state = [any("LinearAttention" in c.__name__ for c in type(layer).__mro__) for layer in layers]
    parts = {
        "latent rows": any(hasattr(m, "expand_kv") for m in decoder.modules()),
        "learned sinks": any("sink" in name for name, _ in decoder.named_parameters()),
        "a cap on logits": bool(getattr(decoder.config, "attn_logit_softcapping", None)),
        "sliding or chunked layers": any("Sliding" in name for name in names),
        "layers that read others' rows": any(name == "DummyLayer" for name in names),
        "states beside full layers": any(s and i not in full for i, s in enumerate(state)),
        "a state in the full layers": any(s and i in full for i, s in enumerate(state)),
    }
    return ", ".join(part for part, has in parts.items() if has) or "full layers alone"


def outcome(kind, trials=None):
    """(verdict, row of the table, what it rests on): same, refused, WRONG, ERROR, or not built."""
    try:
        model = tiny(kind)
    except Exception as error:
        return "not built", "", f"{type(error).__name__}: {error}".splitlines()[0][:110]
    not_alone = []
    try:
        for name in trials or TRIALS:
            said = TRIALS[name](model)
            if said == NO_SUCH:
                not_alone.append(name)
            elif said in REFUSALS.values():
                not_alone.append(f"{name} ({said})")
            elif said is not None:
                return "WRONG", "", f"{name}: {said}"
        spec = hf.describe(model)[0]
    except NotBuilt as error:
        return "not built", "", str(error)
    except kvkeep.Unsupported as error:
        reason = next((row for words, row in REASONS.items() if words in str(error)), "otherwise")
        return "refused", reason, str(error).removeprefix("kvkeep.hf: ")
    except Exception as error:
        return "ERROR", "", f"{name}: {type(error).__name__}: {error}".splitlines()[0][:160]
    full = spec.full_layers
    ropes = {spec.rope(l).style if spec.rope(l).stated else "open" for l in full}
    without = f"; without {', '.join(not_alone)}" if not_alone else ""
    why = f"{len(full)} of {spec.num_layers} layers cut; RoPE {', '.join(sorted(ropes))}{without}"
    return "same", group(model, spec), why


def table(found):
    """The outcomes by row, for docs/reference/python.md."""
    rows = {}
    for kind, (verdict, row, why) in found.items():
        is_open = "; RoPE open" * (verdict == "same" and REFUSALS["RoPE"] in why)
        rows.setdefault((verdict, row + is_open), []).append(kind)
    print("| | families | | try it with `families.py` and |\n|---|---:|---|---|")
    for (verdict, row), kinds in sorted(rows.items(), key=lambda r: (r[0][0] != "same", r[0][0], -len(r[1]))):
        one = min(kinds, key=len)
        quoted = f"'{one}'" if " " in one else one
        names = ", ".join(f"`{kind}`" for kind in sorted(kinds))
        print(f"| {verdict}{': ' * bool(row)}{row} | {len(kinds)} | {names} | `{quoted}` |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="model_type of transformers; none: all of AutoModelForCausalLM")
    parser.add_argument("--family", metavar="REGEX", default="", help="those whose name this matches")
    parser.add_argument("--trials", metavar="REGEX", default="", help=f"some of: {'; '.join(TRIALS)}")
    parser.add_argument("--markdown", action="store_true", help="the table by kinds of layers at the end")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    kinds = arguments.families or sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS])
    trials = [name for name in TRIALS if re.search(arguments.trials, name)]
    found = {}
    for kind in (kind for kind in kinds if re.search(arguments.family, kind)):
        with contextlib.redirect_stdout(io.StringIO()):
            found[kind] = outcome(kind, trials)
        print(f"{kind:26s} {found[kind][0]:10s} {found[kind][2]}", flush=True)
    counts = Counter(verdict for verdict, *_ in found.values())
    said = ", ".join(f"{n} {verdict}" for verdict, n in sorted(counts.items()))
    print(f"\n{len(found)} families of transformers {transformers.__version__}: {said}\n")
    if arguments.markdown:
        table(found)
    return counts["WRONG"] + counts["ERROR"] > 0


if __name__ == "__main__":
    sys.exit(main())
