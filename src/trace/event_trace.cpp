// SPDX-License-Identifier: Apache-2.0
#include "kvkeep/trace/trace.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <span>

#include "kvkeep/allot/allocator.h"
#include "kvkeep/keep/compact.h"
#include "kvkeep/policy/evict.h"
#include "kvkeep/version.h"

#include "kvkeep/io/untrusted_json.h"

namespace kvkeep::trace {
namespace {

using Json = nlohmann::json;

/// One trace, with its shapes known and checked.
struct RecordedEvent {
  ModelSpec spec;  ///< the model's layers; those that the trace does not hold are `remote`
  QueryBasis basis = QueryBasis::pre_rope;
  std::vector<std::string> prefixes;  ///< "" or "layer.<l>."
  std::vector<std::int32_t> layers;   ///< number of each layer of the trace
  std::int64_t batch = 0, slots = 0, queries = 0;
  std::vector<std::int32_t> next_positions;
  std::vector<std::int32_t> lengths;
  std::vector<LayerKv> rows;                 ///< copies, so that they can be compacted
  std::vector<Tensor> positions;             ///< i32 [B, Hkv, T]
  std::vector<Tensor> query_data;            ///< [B, Hq, W, D]
  std::vector<Tensor> query_positions;       ///< i32 [B, W]
  std::vector<Tensor> credit, tally, given;  ///< f32 [B, Hkv, T'], or undefined
  std::vector<Tensor> output_projections;    ///< [num_layers], or empty
  std::vector<PositionSpans> pins;           ///< [B]
};

Json parsed(const io::SafetensorsFile& file, const std::string& key) {
  return io::read_json(metadata(file, key, "; an event trace needs it"),
                       text(file.where(), ": metadata \"", key, "\""));
}

QueryBasis basis_of(const io::SafetensorsFile& file) {
  const std::string& basis = metadata(file, "query_basis", "; allowed pre_rope or post_rope");
  KVKEEP_REQUIRE(basis == "pre_rope" || basis == "post_rope", file.where(), ": metadata \"query_basis\" is \"",
                 shortened(basis), "\"; allowed pre_rope or post_rope");
  return basis == "pre_rope" ? QueryBasis::pre_rope : QueryBasis::post_rope;
}

/// A tensor of one layer, or the one shared by all layers.
Tensor find(const io::SafetensorsFile& file, const std::string& prefix, const std::string& name, bool required = true) {
  for (const std::string& full : {prefix + name, name})
    if (file.has(full)) return file.tensor(full);
  KVKEEP_REQUIRE(!required, file.where(), ": tensor \"", prefix, name, "\" is missing; an event trace needs it");
  return {};
}

/// As i64: code that needs fewer bits checks the numbers first.
Tensor integers(const io::SafetensorsFile& file, const std::string& name, const Tensor& t) {
  want(file, name, t, t.dtype() == Dtype::i32 || t.dtype() == Dtype::i64, "i32 or i64");
  return as<std::int64_t>(t);
}

void check_ascending(const io::SafetensorsFile& file, const std::string& name, const std::int64_t* values,
                     std::int64_t n) {
  std::int64_t last = -1;
  for (std::int64_t t = 0; t < n; ++t) {
    KVKEEP_REQUIRE(values[t] > last && values[t] <= INT32_MAX, file.where(), ": ", name, " holds ", values[t],
                   " after ", last, "; allowed ascending logical positions from 0 to ", INT32_MAX);
    last = values[t];
  }
}

void read_layer(const io::SafetensorsFile& file, const std::string& prefix, RecordedEvent& e) {
  const Tensor keys = find(file, prefix, "keys"), values = find(file, prefix, "values"),
               queries = find(file, prefix, "queries", false);
  const bool first = e.positions.empty();
  want(file, "keys", keys,
       keys.dim() == 4 && is_scorable(keys.dtype()) && keys.numel() > 0 && std::ranges::max(keys.sizes()) <= INT32_MAX,
       "f32, f16 or bf16 [B, Hkv, T, D]");
  if (first) {
    e.batch = keys.size(0);
    e.slots = keys.size(2);
    e.spec.kv_heads = static_cast<std::int32_t>(keys.size(1));
    e.spec.key_dim = static_cast<std::int32_t>(keys.size(3));
  }
  want(file, "keys", keys,
       keys.size(0) == e.batch && keys.size(1) == e.spec.kv_heads && keys.size(2) == e.slots &&
           keys.size(3) == e.spec.key_dim,
       "the shape of the first layer");
  want(file, "values", values,
       values.dim() == 4 && values.numel() > 0 && values.size(0) == e.batch && values.size(1) == e.spec.kv_heads &&
           values.size(2) == e.slots && is_scorable(values.dtype()),
       text("f32, f16 or bf16 [", e.batch, ", ", e.spec.kv_heads, ", ", e.slots, ", Dv]"));
  if (queries.defined())
    want(file, "queries", queries,
         queries.dim() == 4 && queries.size(0) == e.batch && queries.size(1) % e.spec.kv_heads == 0 &&
             queries.size(1) > 0 && queries.size(3) == e.spec.key_dim && is_scorable(queries.dtype()),
         text("f32, f16 or bf16 [", e.batch, ", Hq, W, ", e.spec.key_dim, "] with Hq a multiple of ", e.spec.kv_heads));
  if (first) {
    e.spec.value_dim = static_cast<std::int32_t>(values.size(3));
    e.spec.query_heads = queries.defined() ? static_cast<std::int32_t>(queries.size(1)) : 0;
    e.queries = queries.defined() ? queries.size(2) : 0;
  }
  want(file, "values", values, values.size(3) == e.spec.value_dim, "the head size of the first layer");
  KVKEEP_REQUIRE(queries.defined() == (e.spec.query_heads > 0), file.where(),
                 ": some layers have queries and some do not; allowed all or none");
  if (queries.defined())
    want(file, "queries", queries, queries.size(1) == e.spec.query_heads && queries.size(2) == e.queries,
         "the shape of the first layer");

  Tensor positions = integers(file, "positions", find(file, prefix, "positions"));
  want(
      file, "positions", positions,
      positions.sizes() == Shape({e.batch, e.slots}) || positions.sizes() == Shape({e.batch, e.spec.kv_heads, e.slots}),
      text("[", e.batch, ", ", e.slots, "] or [", e.batch, ", ", e.spec.kv_heads, ", ", e.slots, "]"));
  if (positions.dim() == 2)
    positions = clone(Tensor(positions.bytes(), positions.dtype(), {e.batch, e.spec.kv_heads, e.slots}, {e.slots, 0, 1},
                             {}, positions.owner()));  // the same in every head
  Tensor query_positions;
  if (queries.defined()) {
    query_positions = integers(file, "query_positions", find(file, prefix, "query_positions"));
    want(file, "query_positions", query_positions, query_positions.sizes() == Shape({e.batch, e.queries}),
         text("[", e.batch, ", ", e.queries, "]"));
  }
  for (std::int64_t b = 0; b < e.batch; ++b) {
    if (queries.defined())
      check_ascending(file, "query_positions", query_positions.data<std::int64_t>() + b * e.queries, e.queries);
    for (std::int64_t h = 0; h < e.spec.kv_heads; ++h)
      check_ascending(file, "positions", positions.data<std::int64_t>() + (b * e.spec.kv_heads + h) * e.slots,
                      e.lengths.empty() ? e.slots : e.lengths[static_cast<std::size_t>(b)]);
  }
  const auto column = [&](const char* name) {
    Tensor t = find(file, prefix, name, false);
    if (!t.defined()) return t;
    want(file, name, t,
         t.dim() == 3 && t.size(0) == e.batch && t.size(1) == e.spec.kv_heads && t.size(2) <= e.slots &&
             is_scorable(t.dtype()),
         text("f32, f16 or bf16 [", e.batch, ", ", e.spec.kv_heads, ", at most ", e.slots, "]"));
    return as<float>(t);
  };
  e.credit.push_back(column("credit"));
  e.tally.push_back(column("tally"));
  e.given.push_back(column("given"));
  const auto layer = static_cast<std::size_t>(e.layers[e.positions.size()]);
  const Tensor projection = find(file, prefix, "o_proj", false);
  if (projection.defined()) {
    want(file, "o_proj", projection,
         projection.dim() == 2 && is_scorable(projection.dtype()) && e.spec.query_heads > 0 &&
             projection.size(1) == std::int64_t{e.spec.query_heads} * e.spec.value_dim,
         text("f32, f16 or bf16 [hidden, Hq * Dv = ", std::int64_t{e.spec.query_heads} * e.spec.value_dim,
              "], with queries in the trace"));
    e.output_projections.resize(e.spec.layers.size());
    e.output_projections[layer] = contiguous(projection);
  }
  e.spec.layers[layer].kind = LayerKind::full;
  if (const Tensor sinks = find(file, prefix, "sinks", false); sinks.defined())
    e.spec.layers[layer].sinks = sink_logits(file, "sinks", sinks, e.spec.query_heads);
  e.rows[layer] = DenseKv{clone(keys), clone(values)};
  e.positions.push_back(as<std::int32_t>(positions));
  e.query_positions.push_back(queries.defined() ? as<std::int32_t>(query_positions) : Tensor());
  e.query_data.push_back(queries.defined() ? contiguous(queries) : Tensor());
}

/// Reads which layers the trace holds, and how many the model has.
void read_layer_numbers(const io::SafetensorsFile& file, RecordedEvent& e) {
  constexpr std::int64_t kMost = 1 << 16;
  const auto layer_number = [&](const char* key, const Json& value) {
    const std::optional<std::int64_t> number = io::whole_number(value, 0, kMost - 1);
    KVKEEP_REQUIRE(number.has_value(), file.where(), ": metadata \"", key, "\" names layer ", io::shown(value),
                   "; allowed 0 to ", kMost - 1);
    return static_cast<std::int32_t>(*number);
  };
  if (file.metadata().contains("layers")) {
    const Json layers = parsed(file, "layers");
    KVKEEP_REQUIRE(layers.is_array() && !layers.empty(), file.where(), ": metadata \"layers\" is ", io::shown(layers),
                   "; allowed an array of layer numbers");
    for (const Json& l : layers) {
      e.layers.push_back(layer_number("layers", l));
      e.prefixes.push_back(text("layer.", e.layers.back(), "."));
      KVKEEP_REQUIRE(std::find(e.layers.begin(), e.layers.end() - 1, e.layers.back()) == e.layers.end() - 1,
                     file.where(), ": metadata \"layers\" names layer ", e.layers.back(), " twice");
    }
  } else {
    e.layers.push_back(file.metadata().contains("layer") ? layer_number("layer", parsed(file, "layer")) : 0);
    e.prefixes.emplace_back();
  }
  const std::int32_t most = *std::max_element(e.layers.begin(), e.layers.end());
  std::int32_t count = most + 1;
  if (file.metadata().contains("num_layers")) count = layer_number("num_layers", parsed(file, "num_layers"));
  KVKEEP_REQUIRE(count > most, file.where(), ": metadata \"num_layers\" is ", count,
                 "; allowed more than the largest layer number, ", most);
  e.spec.layers.assign(static_cast<std::size_t>(count), {.kind = LayerKind::remote});
  e.rows.resize(static_cast<std::size_t>(count));
}

void read_pins(const io::SafetensorsFile& file, RecordedEvent& e) {
  e.pins.resize(static_cast<std::size_t>(e.batch));
  if (!file.has("pinned")) return;
  const Tensor pinned = integers(file, "pinned", file.tensor("pinned"));
  want(file, "pinned", pinned, pinned.dim() == 2 && pinned.size(1) == 3, "[spans, 3]");
  for (std::int64_t i = 0; i < pinned.size(0); ++i) {
    const std::int64_t* span = pinned.data<std::int64_t>() + 3 * i;
    KVKEEP_REQUIRE(span[0] >= 0 && span[0] < e.batch && span[1] >= 0 && span[1] < span[2] && span[2] <= INT32_MAX,
                   file.where(), ": pinned holds [", span[0], ", ", span[1], ", ", span[2],
                   "]; allowed a sequence from 0 to ", e.batch - 1, ", and a begin below the end, from 0 to ",
                   INT32_MAX);
    PositionSpans& pins = e.pins[static_cast<std::size_t>(span[0])];
    KVKEEP_REQUIRE(pins.empty() || span[1] > pins.spans().back().end, file.where(), ": pinned holds position ", span[1],
                   " of sequence ", span[0], " after ", pins.spans().back().end, "; allowed spans that ascend");
    pins.add({static_cast<std::int32_t>(span[1]), static_cast<std::int32_t>(span[2])});
  }
}

RopeStyle style_called(const io::SafetensorsFile& file, std::string_view what, std::string_view name) {
  const auto found = std::find(kRopeStyleNames.begin(), kRopeStyleNames.end(), name);
  KVKEEP_REQUIRE(found != kRopeStyleNames.end(), file.where(), ": ", what, " is \"", shortened(name),
                 "\"; allowed half, interleaved or none");
  return static_cast<RopeStyle>(found - kRopeStyleNames.begin());
}

std::vector<double> frequencies_of(const io::SafetensorsFile& file, std::string_view what, const Json& list) {
  KVKEEP_REQUIRE(list.is_array() && std::all_of(list.begin(), list.end(), [](const Json& f) { return f.is_number(); }),
                 file.where(), ": ", what, " is not an array of numbers");
  return list.get<std::vector<double>>();
}

/// Layers whose RoPE is not the model's: {"3": {"rope_style": "none"}, ...}.
void read_layer_ropes(const io::SafetensorsFile& file, RecordedEvent& e) {
  if (!file.metadata().contains("layer_ropes")) return;
  const Json ropes = parsed(file, "layer_ropes");
  KVKEEP_REQUIRE(ropes.is_object(), file.where(), ": metadata \"layer_ropes\" is not an object of layers");
  for (const auto& [key, given] : ropes.items()) {
    std::int32_t layer = -1;
    const auto read = std::from_chars(key.data(), key.data() + key.size(), layer);
    KVKEEP_REQUIRE(
        read.ec == std::errc() && read.ptr == key.data() + key.size() && layer >= 0 && layer < e.spec.num_layers(),
        file.where(), ": metadata \"layer_ropes\" names layer \"", shortened(key), "\"; allowed 0 to ",
        e.spec.num_layers() - 1);
    const std::string what = text("RoPE of layer ", layer, " in metadata \"layer_ropes\"");
    KVKEEP_REQUIRE(given.is_object() && given.contains("rope_style") && given["rope_style"].is_string(), file.where(),
                   ": ", what, " has no rope_style; allowed half, interleaved or none");
    RopeSpec rope{.style = style_called(file, what, given["rope_style"].get<std::string>())};
    if (given.contains("inv_freq")) rope.inv_freq = frequencies_of(file, what, given["inv_freq"]);
    if (given.contains("attention_scaling")) {
      KVKEEP_REQUIRE(given["attention_scaling"].is_number(), file.where(), ": ", what,
                     " has an attention_scaling that is no number");
      rope.attention_scaling = given["attention_scaling"].get<double>();
    }
    e.spec.layers[static_cast<std::size_t>(layer)].rope = std::move(rope);
  }
}

RecordedEvent read_event(const io::SafetensorsFile& file) {
  KVKEEP_REQUIRE(kind_of(file) == "event", file.where(), ": the trace is of kind \"", shortened(kind_of(file)),
                 "\"; allowed here: event");
  RecordedEvent e;
  if (file.metadata().contains("query_basis") || file.has("queries")) e.basis = basis_of(file);
  e.spec.rope.style = style_called(file, "metadata \"rope_style\"",
                                   metadata(file, "rope_style", "; allowed half, interleaved or none"));
  e.spec.rope.inv_freq = frequencies_of(file, "metadata \"inv_freq\"", parsed(file, "inv_freq"));
  e.spec.rope.attention_scaling = number(file, "attention_scaling", 1.0);
  e.spec.softmax_scale = number(file, "softmax_scale", 0.0);
  e.spec.logit_cap = number(file, "logit_cap", 0.0);

  if (file.has("lengths")) {
    const Tensor lengths = integers(file, "lengths", file.tensor("lengths"));
    want(file, "lengths", lengths, lengths.dim() == 1, "[B]");
    for (const std::int64_t length :
         std::span(lengths.data<std::int64_t>(), static_cast<std::size_t>(lengths.numel()))) {
      KVKEEP_REQUIRE(length >= 0 && length <= INT32_MAX, file.where(), ": lengths holds ", length, "; allowed 0 to ",
                     INT32_MAX);
      e.lengths.push_back(static_cast<std::int32_t>(length));
    }
  }
  read_layer_numbers(file, e);
  read_layer_ropes(file, e);
  if (!e.lengths.empty()) {
    const Tensor keys = find(file, e.prefixes.front(), "keys");
    KVKEEP_REQUIRE(keys.dim() == 4 && static_cast<std::int64_t>(e.lengths.size()) == keys.size(0), file.where(),
                   ": lengths holds ", e.lengths.size(), " entries; allowed one per sequence of keys");
    for (const std::int32_t length : e.lengths)
      KVKEEP_REQUIRE(length <= keys.size(2), file.where(), ": lengths holds ", length, "; allowed 0 to ", keys.size(2));
  }
  for (const std::string& prefix : e.prefixes) read_layer(file, prefix, e);
  read_pins(file, e);
  if (e.lengths.empty()) e.lengths.assign(static_cast<std::size_t>(e.batch), static_cast<std::int32_t>(e.slots));
  for (std::int32_t l = 0; l < e.spec.num_layers(); ++l)
    KVKEEP_REQUIRE(e.spec.rope_of(l).rotary_dim() <= e.spec.key_dim, file.where(), ": metadata \"inv_freq\" holds ",
                   e.spec.rope_of(l).inv_freq.size(), " numbers for layer ", l, "; allowed at most ",
                   e.spec.key_dim / 2);
  const Json next = parsed(file, "next_position");
  KVKEEP_REQUIRE(next.is_array() && static_cast<std::int64_t>(next.size()) == e.batch, file.where(),
                 ": metadata \"next_position\" is ", io::shown(next), "; allowed an array of ", e.batch, " positions");
  for (const Json& n : next) {
    const std::optional<std::int64_t> position = io::whole_number(n, 0, INT32_MAX);
    KVKEEP_REQUIRE(position.has_value(), file.where(), ": metadata \"next_position\" holds ", io::shown(n),
                   "; allowed 0 to ", INT32_MAX);
    e.next_positions.push_back(static_cast<std::int32_t>(*position));
  }
  e.spec.check();
  return e;
}

RowTable rows_of(RecordedEvent& e) {
  std::vector<SequenceId> sequences(static_cast<std::size_t>(e.batch));
  std::iota(sequences.begin(), sequences.end(), 0);
  const std::vector<std::int32_t> due(sequences.begin(), sequences.end());
  RowTable table = make_rows(e.spec, e.rows, {.sequences = sequences, .lengths = {e.lengths}}, e.layers, due);
  const std::int64_t planes = e.batch * e.spec.kv_heads;  // rows of one layer of the trace
  const auto column = [](const Tensor& t, std::int64_t plane, std::int32_t length, const float*& data,
                         std::int32_t& known) {
    if (!t.defined()) return;
    known = static_cast<std::int32_t>(std::min<std::int64_t>(t.size(2), length));
    data = t.data<float>() + plane * t.size(2);
  };
  for (std::size_t r = 0; r < table.rows.size(); ++r) {
    Row& row = table.rows[r];
    const std::size_t l = r / static_cast<std::size_t>(planes);
    const std::int64_t plane = static_cast<std::int64_t>(r) % planes;
    row.positions = e.positions[l].data<std::int32_t>() + plane * e.slots;
    column(e.credit[l], plane, row.length, row.credit, row.credit_length);
    column(e.tally[l], plane, row.length, row.tally, row.tally_length);
    column(e.given[l], plane, row.length, row.given, row.given_length);
  }
  for (std::size_t g = 0; g < table.groups.size(); ++g) {
    RowGroup& group = table.groups[g];
    group.next_position = e.next_positions[static_cast<std::size_t>(group.sequence)];
    group.seen = {group.next_position};  // a trace does not record gaps
    group.pinned = e.pins[static_cast<std::size_t>(group.sequence)].spans();
    const std::size_t l = g / static_cast<std::size_t>(e.batch);
    const Tensor& q = e.query_data[l];
    if (!q.defined()) continue;
    const auto bytes = q.element_size();
    const auto count = static_cast<std::int32_t>(e.queries);
    group.queries = {.data = static_cast<const std::byte*>(q.bytes()) + group.sequence * q.stride(0) * bytes,
                     .dtype = q.dtype(),
                     .token_stride = q.stride(2) * bytes,
                     .head_stride = q.stride(1) * bytes,
                     .positions = e.query_positions[l].data<std::int32_t>() + group.sequence * e.queries,
                     .ring = count,
                     .begin = 0,
                     .count = count};
  }
  return table;
}

/// [B, Hkv, width] from one value list per row; short rows end with `pad`.
template <class T, class RowValues>
Tensor stack(const RecordedEvent& e, std::size_t first_row, std::int64_t width, T pad, RowValues&& values) {
  Tensor out = full<T>({e.batch, e.spec.kv_heads, width}, pad);
  for (std::size_t r = 0; r < static_cast<std::size_t>(e.batch * e.spec.kv_heads); ++r) {
    const auto row = values(first_row + r);
    std::copy(row.begin(), row.end(), out.data<T>() + static_cast<std::int64_t>(r) * width);
  }
  return out;
}

/// Writes one layer's part of the result. Rows are in the table in the order layer, sequence, head.
void add_layer(RecordedEvent& e, const RowTable& table, const Decision& decision, const KeepSet& keep,
               std::size_t layer, Result& result) {
  const std::string& prefix = e.prefixes[layer];
  const std::size_t first = layer * static_cast<std::size_t>(e.batch * e.spec.kv_heads);
  const std::size_t last = first + static_cast<std::size_t>(e.batch * e.spec.kv_heads);
  std::int64_t width = 0;
  for (std::size_t r = first; r < last; ++r) width = std::max(width, keep.count(r));
  const auto add = [&](const char* name, Tensor t) { result.tensors.emplace_back(prefix + name, std::move(t)); };
  const auto add_shared = [&](const char* name,
                              Tensor t) {  // one selection for all layers is written once, without a prefix
    if (decision.share == Sharing::per_layer_per_head)
      add(name, std::move(t));
    else if (layer == 0)
      result.tensors.emplace_back(name, std::move(t));
  };
  const auto flat = [&](const Tensor& data) {
    return stack<float>(e, first, e.slots, 0.0F, [&](std::size_t r) {
      return std::span<const float>{data.data<float>() + table.rows[r].first,
                                    static_cast<std::size_t>(table.rows[r].length)};
    });
  };
  add_shared("slots", stack<std::int32_t>(e, first, width, -1, [&](std::size_t r) { return keep.row(r); }));
  if (decision.scores.data.defined()) add_shared("scores", flat(decision.scores.data));
  if (decision.credit) {
    const float* credit = decision.credit->data<float>();
    add("credit", flat(*decision.credit));
    add("credit_kept", stack<float>(e, first, width, 0.0F, [&](std::size_t r) {
          std::vector<float> kept;
          for (const std::int32_t slot : keep.row(r)) kept.push_back(credit[table.rows[r].first + slot]);
          return kept;
        }));
  }
  if (decision.allotment) {
    const Allotment& a = *decision.allotment;
    if (a.mass.data.defined()) add("mass", flat(a.mass.data));
    if (a.mass_used.data.defined()) add("mass_used", flat(a.mass_used.data));
    std::size_t segments = 0;
    for (std::size_t r = first; r < last; ++r) segments = std::max(segments, a.ends[r].size());
    add("segment_ends", stack<std::int32_t>(e, first, static_cast<std::int64_t>(segments), -1,
                                            [&](std::size_t r) { return std::span(a.ends[r]); }));
    add("quotas", stack<std::int32_t>(e, first, static_cast<std::int64_t>(segments), -1,
                                      [&](std::size_t r) { return std::span(a.quotas[r]); }));
  }
  add("positions", stack<std::int32_t>(e, first, width, -1, [&](std::size_t r) {
        std::vector<std::int32_t> kept;
        for (const std::int32_t slot : keep.row(r)) kept.push_back(table.rows[r].positions[slot]);
        return kept;
      }));
  const LayerKv& rows_of_layer = e.rows[static_cast<std::size_t>(e.layers[layer])];
  for (const bool keys : {true, false}) {
    Tensor rows = keys ? std::get<DenseKv>(rows_of_layer).keys : std::get<DenseKv>(rows_of_layer).values;
    rows = clone(rows.narrow(2, 0, width));
    const std::int64_t slot = rows.size(3) * rows.element_size();
    for (std::size_t r = first; r < last; ++r)  // a row's kept slots are followed by its old content
      std::memset(rows.bytes() + (static_cast<std::int64_t>(r - first) * width + keep.count(r)) * slot, 0,
                  static_cast<std::size_t>((width - keep.count(r)) * slot));
    add(keys ? "keys" : "values", rows);
  }
}

}  // namespace

const std::string& metadata(const io::SafetensorsFile& file, const std::string& key, std::string_view rest) {
  const auto found = file.metadata().find(key);
  KVKEEP_REQUIRE(found != file.metadata().end(), file.where(), ": metadata \"", key, "\" is missing", rest);
  return found->second;
}

std::vector<float> sink_logits(const io::SafetensorsFile& file, const std::string& name, const Tensor& t,
                               std::int32_t heads) {
  want(file, name, t, heads > 0 && t.sizes() == Shape({heads}) && is_scorable(t.dtype()),
       text("f32, f16 or bf16 [Hq = ", heads, "], beside queries"));
  const Tensor floats = as<float>(t);
  return {floats.data<float>(), floats.data<float>() + heads};
}

double number(const io::SafetensorsFile& file, const std::string& key, double fallback) {
  if (!file.metadata().contains(key)) return fallback;
  const Json value = parsed(file, key);
  KVKEEP_REQUIRE(value.is_number() && std::isfinite(value.get<double>()) && value.get<double>() > 0, file.where(),
                 ": metadata \"", key, "\" is ", io::shown(value), "; allowed a positive number");
  return value.get<double>();
}

std::string kind_of(const io::SafetensorsFile& file) {
  const std::string& version = metadata(file, "kvkeep_trace", ", so this is not a trace");
  KVKEEP_REQUIRE(version == "1", file.where(), ": the trace has format version ", shortened(version), "; allowed 1");
  return metadata(file, "kind", "; a trace names its kind");
}

Result replay_event(const io::SafetensorsFile& file, const KVPolicy& policy) {
  RecordedEvent e = read_event(file);
  check(policy, e.spec,
        {.queries = e.spec.query_heads > 0,
         .output_projections = e.output_projections,
         .given_scores = std::ranges::all_of(e.given, [](const Tensor& t) { return t.defined(); })});
  const RowTable table = rows_of(e);
  const Decision decision = policy.decide({e.spec, table, e.basis, Moment::step_end, true, e.output_projections});
  const KeepSet keep = decision.keep ? *decision.keep : keep_everything(table);
  check_keep(policy.name(), table, keep);
  check_decision(policy.name(), table, decision);
  compact(table, keep);

  Result result;
  for (std::size_t l = 0; l < e.prefixes.size(); ++l) add_layer(e, table, decision, keep, l, result);
  std::int64_t dropped = 0, chosen = 0;
  for (std::size_t r = 0; r < table.rows.size(); ++r) {
    dropped += table.rows[r].length - keep.count(r);
    if (decision.keep) chosen += decision.chosen(r);
  }
  result.metadata = {{"kvkeep_result", "1"},
                     {"policy", policy.to_json()},
                     {"kvkeep_version", kVersion},
                     {"rows", std::to_string(table.rows.size())},
                     {"slots_kept", std::to_string(keep.indptr.back())},
                     {"slots_chosen", std::to_string(chosen)},
                     {"slots_dropped", std::to_string(dropped)}};
  return result;
}

}  // namespace kvkeep::trace
