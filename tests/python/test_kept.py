# SPDX-License-Identifier: Apache-2.0
"""What attach() shows when a text is written: bytes, the page over the text, and the picture."""

import builtins
import json

import kvkeep
import numpy as np
import pytest
from test_hf import CUT, generate, hf, model_of, tokens_of, torch, with_cache

SLOT = 2 * 16 * 4  # bytes of one slot of one head: keys and values of 16 numbers, f32
RAGGED = "adakv-snapkv,budget=24,interval=8,window=8,prefill=cut"


class Letters:
    """A tokenizer whose token 7 is the first half of a character that 8 completes, and 9 is markup."""

    def decode(self, ids, skip_special_tokens=True):
        assert not skip_special_tokens
        bytes_of = {7: b"\xc3", 8: b"\xa9", 9: b"</script><!--"}
        return b"".join(bytes_of.get(int(id), b" %d" % int(id)) for id in ids).decode(errors="replace")


def data_of(page):
    begin = page.index("const data = ") + 13
    return json.loads(page[begin : page.index(";\n", begin)])


def rows_of(stop):
    return [[p for first, n in zip(r[::2], r[1::2]) for p in range(first, first + n)] for r in stop["kept"]]


@pytest.mark.parametrize("policy", [CUT, RAGGED, "ams-tova,budget=40,interval=8,recent=4,prefill=cut"])
def test_the_page_shows_what_every_row_held_at_each_event_and_at_the_end(policy):
    model, ids = model_of(), tokens_of(60)
    held = []
    with hf.attach(model, policy) as kept:
        cache, keeper = kept.cache(), kept.keeper
        rows = [(layer, head) for layer in range(3) for head in range(2)]
        note = kept.note

        def see(report, of):
            note(report, of)
            held.extend([keeper.positions(0, *row).tolist() for row in rows] for _ in report.cuts)

        kept.note = see
        out = generate(model, ids, new=40, **with_cache(model, cache))
        end = [keeper.positions(0, *row).tolist() for row in rows]
        live = kept.html(None, out)
    del cache
    page = kept.html(None, out)
    assert page == live, "also when the cache is gone"
    data = data_of(page)
    assert data["pieces"] == [f"{id} " for id in out[0, :-1].tolist()] and data["prompt"] == 60
    assert data["policy"] == policy and data["layers"] == [0, 1, 2] and data["kv_heads"] == 2
    assert len(held) == len(kept.events) >= 4
    assert [rows_of(stop) for stop in data["stops"][:-1]] == held
    assert rows_of(data["stops"][-1]) == end
    assert [stop["present"] for stop in data["stops"]] == [*(e.logical_length for e in kept.events), 99]
    assert [stop["bytes"] for stop in data["stops"]] == [SLOT * sum(map(len, r)) for r in [*held, end]]
    assert data["stops"][0]["name"] == f"event 1 of {len(held)}, after token 60"
    assert "http" not in page, "it asks no network"
    assert page._repr_html_().startswith("<iframe srcdoc=") and "<script>" not in page._repr_html_()


def test_characters_of_several_tokens_and_markup_are_shown_as_they_are():
    model = model_of()
    ids = torch.tensor([[20, 7, 8, 9, 21, 7]])
    with hf.attach(model, "full") as kept:
        out = generate(model, ids, new=2, forced_bos_token_id=None)
    out = torch.cat([ids, torch.tensor([[8, 30]])], 1)
    page = kept.html(Letters(), out)
    assert data_of(page)["pieces"] == [" 20", "", "\u00e9", "</script><!--", " 21", "", "\u00e9"]
    assert page.count("</script>") == 1 and "<!--" not in page


def test_a_batch_is_shown_without_its_padding():
    model, ids, mask = model_of(), tokens_of(90).reshape(2, 45), torch.ones(2, 45, dtype=torch.long)
    mask[0, :15] = 0
    with hf.attach(model, CUT) as kept:
        alone = generate(model, ids[:1, 15:], new=30)
        out = generate(model, ids, new=30, attention_mask=mask)
    first, second = (data_of(kept.html(None, out, sequence)) for sequence in (1, 2))
    assert first["stops"] == data_of(kept.html(None, alone, 0))["stops"]
    assert first["prompt"] == 30 and second["prompt"] == 45 and len(second["pieces"]) == 74
    assert first["pieces"] == [f"{id} " for id in out[0, 15:-1].tolist()]
    assert kept.html(None, out) == kept.html(None, out, 1) == kept.html(None, out[0].tolist(), 1)
    one, two, both = kept.memory(1), kept.memory(2), kept.memory()
    assert one.now + two.now == both.now and one.full + two.full == both.full == SLOT * 6 * (59 + 74)
    assert str(both).endswith("MiB") and kept.memory(0) == one


@pytest.mark.parametrize("policy", [CUT, RAGGED])
def test_memory_counts_the_bytes_that_were_held(policy):
    model, ids, seen = model_of(), tokens_of(60), []
    with hf.attach(model, policy) as kept:
        cache = kept.cache()
        with torch.no_grad():
            for part in [ids, *tokens_of(39, 7)[0].reshape(-1, 1, 1)]:
                model(part, **with_cache(model, cache))
                rows = cache.layers[0].rows
                seen.append([SLOT * int(rows.heads(layer).sum()) for layer in range(3)])
        memory = kept.memory()
        assert memory.allocated == sum(b.nbytes for both in rows.buffers for b in both) > 0
    seen = np.array(seen)
    assert memory.now == seen[-1].sum() and memory.full == SLOT * 6 * 99 and memory.peak == seen.sum(1).max()
    assert [(m.layer, m.now, m.full, m.peak) for m in memory.layers] == [
        (i, seen[-1, i], SLOT * 2 * 99, seen[:, i].max()) for i in range(3)
    ]
    assert memory.now < memory.peak < memory.full
    del cache, rows
    gone = kept.memory()
    assert gone.allocated == 0 and (gone.now, gone.full, gone.peak) == (memory.now, memory.full, memory.peak)


def test_tokens_that_were_taken_back_are_not_shown():
    model, ids = model_of(), tokens_of(60)
    with hf.attach(model, CUT) as kept, torch.no_grad():
        cache = kept.cache()
        for part in (ids, tokens_of(1, 2), tokens_of(5, 3)):
            model(part, **with_cache(model, cache))
        cache.crop(-5)
        assert kept.memory().full == SLOT * 6 * 61
        data = data_of(kept.html(None, ids[0].tolist() + [5]))
        assert len(data["pieces"]) == 61 and data["stops"][-1]["present"] == 61
        assert kept.memory().now == data["stops"][-1]["bytes"] == SLOT * 6 * 41


def test_layers_with_a_window_are_left_out():
    model, ids = model_of("gemma3"), tokens_of(60)
    with hf.attach(model, CUT) as kept:
        out = generate(model, ids, new=30)
    assert data_of(kept.html(None, out))["layers"] == [1, 2] == [m.layer for m in kept.memory().layers]


def test_old_sequences_make_room_and_what_is_forgotten_is_refused_by_name():
    model, ids = model_of(), tokens_of(60)
    with hf.attach(model, CUT, remember=2) as kept:
        for name, call in (("memory", kept.memory), ("plot", kept.plot), ("html", lambda: kept.html(None, ids))):
            with pytest.raises(kvkeep.StateError, match=f"{name}: no sequence has run"):
                call()
        outs = [generate(model, ids, new=12) for _ in range(3)]
        with pytest.raises(kvkeep.InvalidArgument, match=r"sequence 0 is not remembered; allowed 1, 2, or a larger"):
            kept.html(None, outs[0], 0)
        assert kept.html(None, outs[1], 1) and kept.memory(2).full == SLOT * 6 * 71
        with pytest.raises(kvkeep.InvalidArgument, match=r"ids are \[1, 60\], and sequence 2 has fed 71 columns"):
            kept.html(None, ids)
        generate(model, ids.expand(3, -1), new=12)
        assert kept.memory().full == 3 * SLOT * 6 * 71, "a batch is remembered whole"
    with hf.attach(model, CUT, remember=0) as kept:
        out = generate(model, ids, new=12)
        assert kept.memory().full == SLOT * 6 * 71
        with pytest.raises(kvkeep.StateError, match="remember=0"):
            kept.html(None, out)
    for wrong in (-1, True, "2", 1.5):
        with pytest.raises(kvkeep.InvalidArgument, match="remember is"):
            hf.attach(model, CUT, remember=wrong)


def test_the_picture_has_the_lines_and_the_positions():
    pytest.importorskip("matplotlib")
    model, ids = model_of(), tokens_of(60)
    with hf.attach(model, RAGGED) as kept:
        out = generate(model, ids, new=40)
    stop = data_of(kept.html(None, out))["stops"]
    for layer in (None, 1):
        figure = kept.plot(layer=layer)
        top, low = figure.axes
        lines = {line.get_label(): line.get_xydata() for line in top.lines}
        assert lines["full cache"].tolist() == [[0, 0], [99, 99]]
        name, rows = ("layer 0", (0, 1)) if layer is None else ("KV head 0", (2,))
        drawn = dict(map(tuple, lines[name].tolist()))  # of two points at one place, the one after the event
        for at in stop:
            assert drawn[at["present"]] == np.mean([len(rows_of(at)[r]) for r in rows])
        image = low.images[0].get_array()
        assert image.shape[:2] == ((3, 99) if layer is None else (2, 99))
        gone = np.array([[p not in rows_of(stop[-1])[r] for p in range(99)] for r in range(6)])
        grey = np.isclose(np.asarray(image), 0xE9 / 255).all(2)
        assert (grey == (gone.reshape(3, 2, 99).all(1) if layer is None else gone[2:4])).all()
        assert figure._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(kvkeep.InvalidArgument, match="layer 5; allowed 0, 1, 2"):
        kept.plot(layer=5)


def test_a_picture_without_matplotlib_is_refused_with_what_to_install(monkeypatch):
    model, ids, known = model_of(), tokens_of(60), builtins.__import__
    with hf.attach(model, CUT) as kept:
        generate(model, ids)

    def without(name, *rest, **more):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return known(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"plot\(\) needs matplotlib.*python -m pip install matplotlib"):
        kept.plot()


def test_the_pieces_of_a_tokenizer_are_its_text(tmp_path):
    import transformers
    from tiny_model import make

    make(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    said = "Why is the \u4e2d\u6587 sky \U0001f30d blue?"
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": said}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with hf.attach(model, CUT) as kept:
        out = model.generate(**inputs, max_new_tokens=30, do_sample=False)
    data = data_of(kept.html(tokenizer, out))
    assert "".join(data["pieces"][: data["prompt"]]) == f"<|user|>{said}<|end|><|assistant|>"
    assert data["pieces"][0] == "<|user|>" and "\u4e2d" in data["pieces"] and data["model"] == tmp_path.name
