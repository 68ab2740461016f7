// SPDX-License-Identifier: Apache-2.0
// The C interface over the Keeper.

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "boundary.h"
#include "kvkeep/c.h"
#include "kvkeep/core/cache_view.h"
#include "kvkeep/keeper/copy_rows.h"
#include "kvkeep/keeper/keeper.h"
#include "kvkeep/parts/given.h"
#include "kvkeep/parts/pins.h"
#include "kvkeep/parts/prompts.h"
#include "kvkeep/parts/surprisal.h"
#include "kvkeep/policy/registry.h"
#include "kvkeep/version.h"
#if KVKEEP_FOLDING
#include "kvkeep/parts/folds.h"
#endif
#if KVKEEP_FILES
#include "kvkeep/policy/plugin.h"
#endif

namespace kvkeep {
namespace {

thread_local std::string last_error;
thread_local const char* last_words = "";

kvkeep_status failed(kvkeep_status status, const char* what) noexcept {
  try {
    last_error = what;
    last_words = last_error.c_str();
  } catch (...) {
    last_words = "out of memory, also for the message of another error";
  }
  return status;
}

template <class T>
void check_report(const T* report) {
  if (report != nullptr) static_cast<void>(size_of(*report, "report"));
}

template <class T>
std::span<T> array(T* data, std::int64_t count, const char* what) {
  KVKEEP_REQUIRE(count >= 0, what, " has ", count, " entries; allowed 0 or more");
  KVKEEP_REQUIRE(data != nullptr || count == 0, what, " is NULL; allowed an address of ", count, " entries");
  return {data, static_cast<std::size_t>(count)};
}

/// The ids of the sequences of a call.
std::span<const std::int64_t> ids(const std::int64_t* sequences, std::int64_t count, const char* what) {
  KVKEEP_REQUIRE(count <= INT32_MAX, what, " has ", count, " entries; allowed up to ", INT32_MAX);
  return array(sequences, count, what);
}

/// An array that may be absent.
template <class T>
std::span<T> array_if(T* data, std::int64_t count) {
  return data == nullptr ? std::span<T>() : std::span<T>(data, static_cast<std::size_t>(count));
}

Dtype dtype_of(int code, int bits, int lanes, const char* what) {
  struct Known {
    int code, bits;
    Dtype dtype;
  };
  static constexpr Known kKnown[] = {{KVKEEP_FLOAT, 32, Dtype::f32},         {KVKEEP_FLOAT, 16, Dtype::f16},
                                     {KVKEEP_BFLOAT, 16, Dtype::bf16},       {KVKEEP_FLOAT, 64, Dtype::f64},
                                     {KVKEEP_INT, 64, Dtype::i64},           {KVKEEP_INT, 32, Dtype::i32},
                                     {KVKEEP_INT, 16, Dtype::i16},           {KVKEEP_INT, 8, Dtype::i8},
                                     {KVKEEP_UINT, 64, Dtype::u64},          {KVKEEP_UINT, 32, Dtype::u32},
                                     {KVKEEP_UINT, 16, Dtype::u16},          {KVKEEP_UINT, 8, Dtype::u8},
                                     {KVKEEP_BOOL, 8, Dtype::boolean},       {KVKEEP_FLOAT8_E4M3, 8, Dtype::f8_e4m3},
                                     {KVKEEP_FLOAT8_E5M2, 8, Dtype::f8_e5m2}};
  for (const Known& known : kKnown)
    if (known.code == code && known.bits == bits && lanes == 1) return known.dtype;
  refuse(what, ": its dtype has code ", code, ", ", bits, " bits and ", lanes,
         " lanes; allowed floats of 16, 32 and 64 bits, bfloats, integers, bool, float8 e4m3fn and e5m2, of one lane");
}

Device device_of(int type, std::int32_t index, const char* what) {
  if (type == KVKEEP_CPU || type == KVKEEP_CUDA_HOST) return {};
  KVKEEP_REQUIRE(type == KVKEEP_CUDA, what, ": its device has type ", type, "; allowed CPU (", KVKEEP_CPU, "), CUDA (",
                 KVKEEP_CUDA, ") and CUDA's host memory (", KVKEEP_CUDA_HOST, ")");
  return {.kind = Device::Kind::cuda, .index = index};
}

Tensor view_of(const kvkeep_tensor& t, const char* what) {
  KVKEEP_REQUIRE(t.ndim >= 0 && t.ndim <= static_cast<std::int32_t>(Shape::kMostDims), what, ": ndim is ", t.ndim,
                 "; allowed 0 to ", Shape::kMostDims);
  const Shape sizes(array<const std::int64_t>(t.shape, t.ndim, text(what, ": shape").c_str()));
  for (const std::int64_t size : sizes)
    KVKEEP_REQUIRE(size >= 0, what, ": shape is ", sizes, "; allowed sizes of 0 or more");
  const Dtype dtype = dtype_of(t.dtype.code, t.dtype.bits, t.dtype.lanes, what);
  const Device device = device_of(t.device.type, t.device.index, what);
  KVKEEP_REQUIRE(t.data != nullptr || sizes.product() == 0, what, ": data is NULL; allowed an address");
  constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max();
  KVKEEP_REQUIRE(t.byte_offset <= kMost, what, ": byte_offset is ", t.byte_offset, "; allowed up to ", kMost);
  auto* const data = t.data == nullptr ? nullptr : static_cast<std::byte*>(t.data) + t.byte_offset;
  if (t.strides == nullptr) return {data, dtype, sizes, device};
  return {data, dtype, sizes, Shape(array<const std::int64_t>(t.strides, t.ndim, what)), device};
}

Tensor view_if(const kvkeep_tensor* t, const char* what) { return t == nullptr ? Tensor() : view_of(*t, what); }

/// An enumeration's value out of 0 to `most`.
template <class E>
E one_of(std::int32_t value, E most, const char* what) {
  KVKEEP_REQUIRE(value >= 0 && value <= static_cast<std::int32_t>(most), what, " is ", value, "; allowed 0 to ",
                 static_cast<std::int32_t>(most));
  return static_cast<E>(value);
}

RopeSpec rope_of(std::int32_t style, const double* inv_freq, std::int32_t pairs, double attention_scaling,
                 const char* what) {
  RopeSpec rope{.style = one_of(style, RopeStyle::none, text(what, ": rope_style").c_str())};
  const auto turns = array(inv_freq, pairs, text(what, ": inv_freq").c_str());
  rope.inv_freq.assign(turns.begin(), turns.end());
  if (attention_scaling != 0) rope.attention_scaling = attention_scaling;
  return rope;
}

ModelSpec spec_of(const kvkeep_model* model) {
  const kvkeep_model m = given(model, "model");
  KVKEEP_REQUIRE(m.num_layers >= 1 && m.num_layers <= ModelSpec::kMostRows, "model: num_layers is ", m.num_layers,
                 "; allowed 1 to ", ModelSpec::kMostRows);
  ModelSpec spec;
  spec.query_heads = m.query_heads;
  spec.kv_heads = m.kv_heads;
  spec.key_dim = m.key_dim;
  spec.value_dim = m.value_dim;
  spec.softmax_scale = m.softmax_scale;
  spec.rope = rope_of(m.rope_style, m.inv_freq, m.rope_pairs, m.rope_attention_scaling, "model");
  spec.layers.resize(static_cast<std::size_t>(m.num_layers));
  for (std::size_t l = 0; m.layers != nullptr && l < spec.layers.size(); ++l)
    spec.layers[l] = {.kind = one_of(m.layers[l].kind, LayerKind::other, "model: kind of a layer"),
                      .window = m.layers[l].window,
                      .source = m.layers[l].source};
  const auto named = [&](std::int32_t layer, const char* list) -> LayerSpec& {
    KVKEEP_REQUIRE(layer >= 0 && layer < m.num_layers, "model: ", list, " names layer ", layer, "; allowed 0 to ",
                   m.num_layers - 1);
    return spec.layers[static_cast<std::size_t>(layer)];
  };
  for (const kvkeep_layer_rope& own : array(m.layer_ropes, m.num_layer_ropes, "model: layer_ropes"))
    named(own.layer, "layer_ropes").rope = rope_of(own.style, own.inv_freq, own.pairs, own.attention_scaling,
                                                   text("model: RoPE of layer ", own.layer).c_str());
  for (const kvkeep_layer_sinks& own : array(m.layer_sinks, m.num_layer_sinks, "model: layer_sinks")) {
    const auto sinks = array(own.sinks, own.heads, text("model: sinks of layer ", own.layer).c_str());
    named(own.layer, "layer_sinks").sinks.assign(sinks.begin(), sinks.end());
  }
  spec.logit_cap = m.logit_cap;
  return spec;
}

Provided provided_of(const kvkeep_provided* provided, std::int32_t layers) {
  if (provided == nullptr) return {};
  const kvkeep_provided p = given(provided, "provided");
  Provided all{.queries = p.queries != 0,
               .layer_by_layer = p.layer_by_layer != 0,
               .surprisal = p.surprisal != 0,
               .given_scores = p.given_scores != 0,
               .reads_folded = p.reads_folded != 0};
  for (std::int32_t l = 0; p.output_projections != nullptr && l < layers; ++l)
    all.output_projections.push_back(view_if(p.output_projections[l], "provided: output_projections"));
  if (p.accelerator != nullptr) all.accelerator = p.accelerator->machine;
  if (p.threads != nullptr) {
    KVKEEP_REQUIRE(p.threads->run != nullptr, "provided: threads: run is NULL; allowed an address");
    all.threads = {p.threads->run, p.threads->pool};
  }
  if (p.trace != nullptr) all.trace = {p.trace->begin, p.trace->end, p.trace->context};
  return all;
}

static_assert(KVKEEP_OPEN_PROMPT == kOpenPrompt);

/// -1: not given.
std::optional<std::int32_t> prompt_of(std::int32_t prompt) {
  return prompt == -1 ? std::nullopt : std::optional(prompt);
}
std::optional<std::int64_t> tokens_of(std::int64_t tokens) {
  return tokens == -1 ? std::nullopt : std::optional(tokens);
}

std::span<const std::byte> bytes_of(const void* bytes, std::size_t count) {
  return array(static_cast<const std::byte*>(bytes), static_cast<std::int64_t>(count), "bytes");
}

/// What `make` returns is the keeper's until the next of these calls.
template <class Make>
void give_bytes(kvkeep_keeper& k, const void** bytes, std::size_t* count, const Make& make) {
  const void*& to = required(bytes, "bytes");
  std::size_t& size = required(count, "count");
  k.bytes = make();
  to = k.bytes.data();
  size = k.bytes.size();
}

[[maybe_unused, noreturn]] void refuse_files(const char* what) {
  refuse<Unsupported>(what, ": this build leaves out files and JSON; allowed in one with KVKEEP_FILES=ON");
}

/// Calls `body` with a Keeper whose saved state it needs, which a build without files does not have.
template <class Handle, class Body>
kvkeep_status with_files(const char* what, Handle* keeper, const Body& body) {
  return guarded([&] {
    if constexpr (KVKEEP_FILES)
      body(required(keeper, "keeper").keeper);
    else
      refuse_files(what);
  });
}

std::unique_ptr<KVPolicy> policy_of(const char* policy) {
  const std::string_view said = &required(policy, "policy");
  const std::size_t first = said.find_first_not_of(" \t\r\n");
  if (first == std::string_view::npos || said[first] != '{') return make_policy(said);
#if KVKEEP_FILES
  return make_policy_from_json(said);
#else
  refuse_files("a policy in JSON");
#endif
}

/// The number of tokens that `indptr` names.
std::int64_t tokens_in(std::span<const std::int32_t> indptr) { return indptr.empty() ? 0 : indptr.back(); }

Observation observation_of(const kvkeep_observation* observation) {
  const kvkeep_observation o = given(observation, "observation");
  Observation made{.layer = o.layer,
                   .sequences = ids(o.sequences, o.num_sequences, "observation: sequences"),
                   .indptr = array(o.indptr, o.num_sequences + 1, "observation: indptr"),
                   .queries = view_if(o.queries, "observation: queries"),
                   .basis = one_of(o.basis, QueryBasis::post_rope, "observation: basis"),
                   .unread = o.unread != 0,
                   .log_sum_exp = view_if(o.log_sum_exp, "observation: log_sum_exp")};
  made.positions = array_if(o.positions, tokens_in(made.indptr));
  return made;
}

/// An engine's functions as a PageAllocator.
class Pages final : public PageAllocator {
 public:
  explicit Pages(const kvkeep_page_allocator* own) {
    if (own == nullptr) return;
    own_ = *own;
    KVKEEP_REQUIRE(own_.references != nullptr && own_.take != nullptr && own_.give_back != nullptr,
                   "cache: pages lacks a function; allowed references, take and give_back together");
  }
  [[nodiscard]] std::int32_t references(std::int32_t page) const override {
    return own_.references(own_.context, page);
  }
  [[nodiscard]] std::int32_t take() override { return own_.take(own_.context); }
  void give_back(std::int32_t page) override { own_.give_back(own_.context, page); }
  [[nodiscard]] PageAllocator* here() { return own_.take == nullptr ? nullptr : this; }

 private:
  kvkeep_page_allocator own_{};
};

LayerKv layer_of(const kvkeep_layer_cache& layer, const kvkeep_tensor* extra) {
  if (layer.form == KVKEEP_NO_ROWS) return {};
  KVKEEP_REQUIRE(layer.form >= KVKEEP_DENSE && layer.form <= KVKEEP_PAGES_HEAD_SLOT, "cache: form of a layer is ",
                 layer.form, "; allowed 0 to ", static_cast<int>(KVKEEP_PAGES_HEAD_SLOT));
  const Tensor keys = view_of(required(layer.keys, "cache: keys"), "cache: keys"),
               values = view_of(required(layer.values, "cache: values"), "cache: values"),
               key_scales = view_if(layer.key_scales, "cache: key_scales"),
               value_scales = view_if(layer.value_scales, "cache: value_scales"),
               extras = view_if(extra, "cache: extra");
  if (layer.form == KVKEEP_DENSE) return DenseKv{keys, values, key_scales, value_scales, 0, 0, extras};
  const auto layout = layer.form == KVKEEP_PAGES_SLOT_HEAD ? PageLayout::slot_head : PageLayout::head_slot;
  return PagedKv{keys, values, layout, key_scales, value_scales, 0, 0, extras};
}

CacheView view_of(const kvkeep_cache& c, Pages& pages, const ModelSpec& spec) {
  KVKEEP_REQUIRE(c.rows_per_sequence == 1 || c.rows_per_sequence == spec.num_layers() * spec.kv_heads,
                 "cache: rows_per_sequence is ", c.rows_per_sequence,
                 "; allowed 1, or layers times KV heads: ", spec.num_layers() * spec.kv_heads);
  CacheView view;
  view.sequences = ids(c.sequences, c.num_sequences, "cache: sequences");
  view.lengths = {array(c.lengths, c.num_sequences * c.rows_per_sequence, "cache: lengths"), c.rows_per_sequence};
  view.places = array_if(c.places, c.num_sequences);
  view.starts = array_if(c.starts, c.num_sequences);
  view.block_table = view_if(c.block_table, "cache: block_table");
  view.pages = pages.here();
  view.named = ids(c.named, c.num_named, "cache: named");
  view.shared_pages = one_of(c.shared_pages, SharedPages::refuse, "cache: shared_pages");
  return view;
}

/// The view of a call. The pages' functions live as long as it.
struct View {
  View(const kvkeep_cache* cache, const ModelSpec& spec) : View(given(cache, "cache"), spec) {}
  View(const kvkeep_cache& cache, const ModelSpec& spec) : pages(cache.pages), view(view_of(cache, pages, spec)) {}
  Pages pages;
  CacheView view;
};

/// Room for the results of an event, so that nothing fails once it has happened.
void make_room(kvkeep_keeper& k, std::size_t cuts, std::size_t unscored, std::size_t prompts) {
  k.cuts.reserve(cuts);
  k.pages.reserve(std::max(cuts, prompts));
  k.unscored.reserve(unscored);
  k.prompts.reserve(prompts);
}

void list_pages(kvkeep_keeper& k, std::vector<PageMove> moves) noexcept {
  k.moves = std::move(moves);
  k.pages.clear();
  for (const PageMove& move : k.moves)
    k.pages.push_back({.index = move.sequence,
                       .num_held = static_cast<std::int32_t>(move.after.size()),
                       .num_freed = static_cast<std::int32_t>(move.freed.size()),
                       .num_written = static_cast<std::int32_t>(move.written.size()),
                       .held = move.after.data(),
                       .freed = move.freed.data(),
                       .written = move.written.data(),
                       .taken = move.taken});
}

/// Report and Plan have these in common. Needs make_room().
template <class Result>
kvkeep_report report_of(kvkeep_keeper& k, const Result& result, std::vector<PageMove> pages) noexcept {
  k.cuts.clear(), k.unscored.clear();
  for (const Cut& cut : result.cuts)
    k.cuts.push_back(
        {cut.sequence, cut.logical_length, cut.length_before, cut.length_after, cut.slots_before, cut.slots_after});
  for (const Unscored& one : result.unscored) k.unscored.push_back({one.sequence, one.layer, one.position});
  list_pages(k, std::move(pages));
  kvkeep_report report{};
  report.num_cuts = std::ssize(k.cuts);
  report.num_pages = std::ssize(k.pages);
  report.num_unscored = std::ssize(k.unscored);
  report.cuts = k.cuts.data();
  report.pages = k.pages.data();
  report.unscored = k.unscored.data();
  report.bytes_before = result.bytes_before;
  report.bytes_after = result.bytes_after;
  for (const Cut& cut : result.cuts) {
    report.slots_kept += cut.slots_after;
    report.slots_chosen += cut.slots_chosen;
    report.slots_dropped += cut.slots_before - cut.slots_after;
  }
  return report;
}

/// What the policy of a keeper reads by kvkeep_give() and the like. Throws Unsupported if it reads `nothing` of it.
template <class P>
P& part_of(kvkeep_keeper* keeper, const char* operation, const char* nothing) {
  Keeper& own = required(keeper, "keeper").keeper;
  if (P* const found = own.find<P>()) return *found;
  refuse<Unsupported>(operation, ": policy ", own.policy().name(), " reads ", nothing,
                      "; allowed under a policy that does");
}

/// A call in a layer that the policy does nothing in may name only what the keeper knows, too.
void check_unread(const char* operation, const Keeper& keeper, const Observation& o) {
  KVKEEP_REQUIRE(o.layer >= 0 && o.layer < keeper.spec().num_layers(), operation, ": layer ", o.layer,
                 " is out of range; allowed 0 to ", keeper.spec().num_layers() - 1);
  KVKEEP_REQUIRE(o.indptr.front() == 0 && std::ranges::is_sorted(o.indptr), operation,
                 ": indptr does not ascend from 0; allowed one entry more than sequences, the first one 0");
  for (const SequenceId id : o.sequences)
    if (!keeper.knows(id)) refuse_unknown(operation, id);
}

void check_shapes(const char* operation, const Observation& o, const ModelSpec& spec, const Attended& attended) {
  const Shape out{o.indptr.back(), spec.query_heads, spec.value_dim}, log_sum_exp{o.indptr.back(), spec.query_heads};
  KVKEEP_REQUIRE(attended.out.dtype() == Dtype::f32 && attended.log_sum_exp.dtype() == Dtype::f32 &&
                     attended.out.sizes() == out && attended.log_sum_exp.sizes() == log_sum_exp,
                 operation, ": the output of attention in layer ", o.layer, " is ", attended.out.dtype(), " ",
                 attended.out.sizes(), " and ", attended.log_sum_exp.dtype(), " ", attended.log_sum_exp.sizes(),
                 "; allowed f32 ", out, " and ", log_sum_exp);
}

kvkeep_report report_of_event(kvkeep_keeper& k, Report event) noexcept {
  kvkeep_report report = report_of(k, event, std::move(event.pages));
  report.slots_kept = event.slots_kept;
  report.slots_chosen = event.slots_chosen;
  report.slots_dropped = event.slots_dropped;
  report.slots_folded = event.slots_folded;
  report.far_bytes = event.far_bytes;
  report.bytes_moved = event.bytes_moved;
  report.pages_freed = event.pages_freed;
  report.pending = event.pending ? 1 : 0;
  return report;
}

/// Does what a plan says; completely, if `report` has no room to say that the event is pending.
void carry_out(kvkeep_keeper& k, const Plan& plan, const CacheView& view, kvkeep_report* report) {
  make_room(k, plan.cuts.size(), plan.unscored.size(), 0);
  EventHandle event = k.keeper.apply(plan, view);
  const bool says = report != nullptr && report->size >= offsetof(kvkeep_report, slots_kept);
  if (!says) event.wait();
  if (report != nullptr) give_back(report_of_event(k, std::move(event).report()), report);
}

}  // namespace

static_assert(static_cast<int>(ErrorCode::invalid_argument) == KVKEEP_INVALID_ARGUMENT &&
              static_cast<int>(ErrorCode::state) == KVKEEP_STATE_ERROR &&
              static_cast<int>(ErrorCode::unsupported) == KVKEEP_UNSUPPORTED &&
              static_cast<int>(ErrorCode::device) == KVKEEP_DEVICE_ERROR &&
              static_cast<int>(ErrorCode::other) == KVKEEP_INTERNAL &&
              static_cast<int>(ErrorCode::rank) == KVKEEP_RANK_ERROR);

kvkeep_status status_of_exception() noexcept {
  try {
    throw;
  } catch (const Error& error) {
    return failed(static_cast<kvkeep_status>(error.code()), said_by(error));
  } catch (const std::bad_alloc&) {
    last_words = "out of memory";
    return KVKEEP_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    return failed(KVKEEP_INTERNAL, said_by(error));
  } catch (...) {
    last_words = "an exception of an unknown type, perhaps of a page allocator or a plug-in";
    return KVKEEP_INTERNAL;
  }
}

// Functions with C linkage are the same ones in any namespace.
extern "C" {

const char* kvkeep_last_error(void) { return last_words; }
int32_t kvkeep_c_version(void) { return KVKEEP_C_VERSION; }
const char* kvkeep_version(void) { return kVersion; }

kvkeep_status kvkeep_load_plugin(const char* file) {
#if KVKEEP_FILES
  return guarded([&] { load_plugin(&required(file, "load_plugin: the path")); });
#else
  static_cast<void>(file);
  return guarded([] { refuse_files("load_plugin"); });
#endif
}

kvkeep_status kvkeep_keeper_make(const kvkeep_model* model, const char* policy, const kvkeep_provided* provided,
                                 kvkeep_keeper** keeper) {
  return guarded([&] {
    required(keeper, "keeper") = nullptr;
    ModelSpec spec = spec_of(model);
    Provided supplied = provided_of(provided, spec.num_layers());
    *keeper = new kvkeep_keeper(std::move(spec), policy_of(policy), std::move(supplied));
  });
}

void kvkeep_keeper_free(kvkeep_keeper* keeper) { delete keeper; }

const char* kvkeep_policy_json(const kvkeep_keeper* keeper) { return keeper == nullptr ? "" : keeper->json.c_str(); }

kvkeep_status kvkeep_join(kvkeep_keeper* keeper, int64_t sequence, int32_t tokens, int32_t prompt) {
  return guarded([&] { required(keeper, "keeper").keeper.join(sequence, tokens, prompt_of(prompt)); });
}
kvkeep_status kvkeep_bind(kvkeep_keeper* keeper, const kvkeep_layer_cache* layers) {
  return kvkeep_bind_extra(keeper, layers, nullptr);
}
kvkeep_status kvkeep_bind_extra(kvkeep_keeper* keeper, const kvkeep_layer_cache* layers,
                                const kvkeep_tensor* const* extra) {
  return guarded([&] {
    Keeper& own = required(keeper, "keeper").keeper;
    std::vector<LayerKv> all;
    for (const kvkeep_layer_cache& layer : array(layers, own.spec().num_layers(), "cache: layers"))
      all.push_back(layer_of(layer, extra == nullptr ? nullptr : extra[all.size()]));
    own.bind(std::move(all));
  });
}
kvkeep_status kvkeep_leave(kvkeep_keeper* keeper, int64_t sequence) {
  return guarded([&] { required(keeper, "keeper").keeper.leave(sequence); });
}
kvkeep_status kvkeep_reset(kvkeep_keeper* keeper, int64_t sequence) {
  return guarded([&] {
    Keeper& own = required(keeper, "keeper").keeper;
    own.leave(sequence);
    own.join(sequence);
  });
}
kvkeep_status kvkeep_end_prompt(kvkeep_keeper* keeper, int64_t sequence) {
  return guarded([&] { required(keeper, "keeper").keeper.end_prompt(sequence); });
}
kvkeep_status kvkeep_pin(kvkeep_keeper* keeper, int64_t sequence, int64_t begin, int64_t end) {
  return guarded([&] { required(keeper, "keeper").keeper.part<parts::Pins>().pin(sequence, begin, end); });
}
kvkeep_status kvkeep_unpin(kvkeep_keeper* keeper, int64_t sequence, int64_t begin, int64_t end) {
  return guarded([&] { required(keeper, "keeper").keeper.part<parts::Pins>().unpin(sequence, begin, end); });
}
kvkeep_status kvkeep_truncate(kvkeep_keeper* keeper, int64_t sequence, int64_t logical_length) {
  return guarded([&] { required(keeper, "keeper").keeper.truncate(sequence, logical_length); });
}
kvkeep_status kvkeep_fork(kvkeep_keeper* keeper, int64_t child, int64_t parent, int64_t tokens, int32_t prompt) {
  return guarded([&] { required(keeper, "keeper").keeper.fork(child, parent, tokens_of(tokens), prompt_of(prompt)); });
}
kvkeep_status kvkeep_save_bytes(kvkeep_keeper* keeper, int64_t sequence, const void** bytes, size_t* count) {
  return with_files("save", keeper,
                    [&](auto& k) { give_bytes(*keeper, bytes, count, [&] { return k.save(sequence); }); });
}
kvkeep_status kvkeep_restore_bytes(kvkeep_keeper* keeper, int64_t sequence, const void* bytes, size_t count,
                                   int32_t prompt) {
  return with_files("restore", keeper,
                    [&](auto& k) { k.restore(sequence, bytes_of(bytes, count), prompt_of(prompt)); });
}
kvkeep_status kvkeep_restore_prefix(kvkeep_keeper* keeper, int64_t sequence, const void* bytes, size_t count,
                                    int64_t tokens, int32_t prompt) {
  return with_files("restore", keeper, [&](auto& k) {
    k.restore(sequence, bytes_of(bytes, count), prompt_of(prompt), tokens_of(tokens));
  });
}
kvkeep_status kvkeep_save(const kvkeep_keeper* keeper, int64_t sequence, const char* file) {
  return with_files("save", keeper, [&](auto& k) { k.save(sequence, &required(file, "file")); });
}
kvkeep_status kvkeep_restore(kvkeep_keeper* keeper, int64_t sequence, const char* file) {
  return with_files("restore", keeper, [&](auto& k) { k.restore(sequence, &required(file, "file")); });
}

kvkeep_status kvkeep_observe(kvkeep_keeper* keeper, const kvkeep_observation* observation) {
  return guarded([&] { required(keeper, "keeper").keeper.observe(observation_of(observation)); });
}

kvkeep_status kvkeep_begin_step(kvkeep_keeper* keeper, const kvkeep_step_tokens* tokens) {
  return guarded([&] {
    const kvkeep_step_tokens t = given(tokens, "tokens");
    StepTokens step{.sequences = ids(t.sequences, t.num_sequences, "tokens: sequences"),
                    .indptr = array(t.indptr, t.num_sequences + 1, "tokens: indptr"),
                    .query_dtype = dtype_of(t.query_code, t.query_bits, 1, "tokens"),
                    .basis = one_of(t.basis, QueryBasis::post_rope, "tokens: basis"),
                    .log_sum_exp = t.log_sum_exp != 0};
    step.positions = array_if(t.positions, tokens_in(step.indptr));
    required(keeper, "keeper").keeper.begin_step(step);
  });
}

kvkeep_status kvkeep_record(kvkeep_keeper* keeper, int32_t layer, const kvkeep_tensor* queries,
                            const kvkeep_tensor* log_sum_exp) {
  return guarded([&] {
    required(keeper, "keeper").keeper.record(layer, view_if(queries, "queries"), view_if(log_sum_exp, "log_sum_exp"));
  });
}

kvkeep_status kvkeep_give(kvkeep_keeper* keeper, int32_t layer, int64_t num_sequences, const int64_t* sequences,
                          const int32_t* indptr, const kvkeep_tensor* scores) {
  return guarded([&] {
    const GivenScores given{.layer = layer,
                            .sequences = ids(sequences, num_sequences, "sequences"),
                            .indptr = array(indptr, num_sequences + 1, "indptr"),
                            .scores = view_if(scores, "scores")};
    part_of<parts::Given>(keeper, "give", "no scores of the engine's").give(given);
  });
}

kvkeep_status kvkeep_surprise(kvkeep_keeper* keeper, int64_t sequence, const float* nats, int64_t count) {
  return guarded([&] {
    part_of<parts::Surprisal>(keeper, "surprise", "no surprisal").supply(sequence, array(nats, count, "nats"));
  });
}

kvkeep_status kvkeep_prefetch(kvkeep_keeper* keeper, const kvkeep_observation* observation) {
  return guarded([&] {
    Keeper& own = required(keeper, "keeper").keeper;
    const Observation seen = observation_of(observation);
#if KVKEEP_FOLDING
    if (auto* const part = own.find<parts::Folds>()) return part->prefetch(seen);
#endif
    check_unread("prefetch", own, seen);
  });
}

kvkeep_status kvkeep_view(kvkeep_keeper* keeper, const kvkeep_observation* observation, const kvkeep_tensor* out,
                          const kvkeep_tensor* log_sum_exp) {
  return guarded([&] {
    const Attended attended{view_of(required(out, "out"), "out"),
                            view_of(required(log_sum_exp, "log_sum_exp"), "log_sum_exp")};
    Keeper& own = required(keeper, "keeper").keeper;
    const Observation seen = observation_of(observation);
#if KVKEEP_FOLDING
    if (auto* const part = own.find<parts::Folds>()) return static_cast<void>(part->view(seen, attended));
#endif
    check_unread("view", own, seen);
    check_shapes("view", seen, own.spec(), attended);
  });
}

kvkeep_status kvkeep_step(kvkeep_keeper* keeper, const kvkeep_cache* cache, kvkeep_report* report) {
  return guarded([&] {
    kvkeep_keeper& k = required(keeper, "keeper");
    check_report(report);
    const View view(cache, k.keeper.spec());
    carry_out(k, k.keeper.plan(view.view), view.view, report);
  });
}

kvkeep_status kvkeep_plan(kvkeep_keeper* keeper, const kvkeep_cache* cache, kvkeep_report* report) {
  return guarded([&] {
    kvkeep_keeper& k = required(keeper, "keeper");
    check_report(report);
    const View view(cache, k.keeper.spec());
    k.plan.reset();
    Plan plan = k.keeper.plan(view.view);
    make_room(k, plan.cuts.size(), plan.unscored.size(), 0);
    std::vector<PageMove> pages = plan.pages;
    k.plan = std::move(plan);
    if (report != nullptr) give_back(report_of(k, *k.plan, std::move(pages)), report);
  });
}

kvkeep_status kvkeep_apply(kvkeep_keeper* keeper, const kvkeep_cache* cache, kvkeep_report* report) {
  return guarded([&] {
    kvkeep_keeper& k = required(keeper, "keeper");
    check_report(report);
    KVKEEP_REQUIRE_AS(StateError, k.plan.has_value(), "apply: there is no plan; allowed after plan(), once");
    const View view(cache, k.keeper.spec());
    carry_out(k, *k.plan, view.view, report);
    k.plan.reset();
  });
}

kvkeep_status kvkeep_finish(kvkeep_keeper* keeper, const kvkeep_cache* cache, kvkeep_report* report) {
  return guarded([&] {
    kvkeep_keeper& k = required(keeper, "keeper");
    check_report(report);
    const View view(cache, k.keeper.spec());
    Report event = k.keeper.finish(view.view);
    if (report != nullptr) give_back(report_of_event(k, std::move(event)), report);
  });
}

kvkeep_status kvkeep_workspace_bytes(const kvkeep_keeper* keeper, const kvkeep_cache* cache, int64_t* bytes) {
  return guarded([&] {
    const Keeper& k = required(keeper, "keeper").keeper;
    const View view(cache, k.spec());
    required(bytes, "bytes") = k.workspace_bytes(view.view);
  });
}

kvkeep_status kvkeep_use_workspace(kvkeep_accelerator* accelerator, const kvkeep_tensor* memory) {
  return guarded([&] {
    required(accelerator, "accelerator").machine->use_workspace(view_of(required(memory, "memory"), "workspace"));
  });
}

void kvkeep_accelerator_free(kvkeep_accelerator* accelerator) { delete accelerator; }

kvkeep_status kvkeep_narrow(kvkeep_keeper* keeper, const kvkeep_observation* observation, const kvkeep_cache* cache,
                            kvkeep_layer_report* report) {
  return guarded([&] {
    kvkeep_keeper& k = required(keeper, "keeper");
    check_report(report);
    const View view(cache, k.keeper.spec());
    const Observation seen = observation_of(observation);
    make_room(k, 0, 0, seen.sequences.size());
    auto* const part = k.keeper.find<parts::Prompts>();
    if (part == nullptr) check_unread("narrow", k.keeper, seen);
    LayerReport layer = part == nullptr ? LayerReport{} : part->narrow(seen, view.view);
    if (report == nullptr) return;
    k.narrowed = std::move(layer.prompts);
    k.prompts.clear();
    for (const Narrowing& one : k.narrowed)
      k.prompts.push_back({.sequence = one.sequence,
                           .all_continue = one.tokens.has_value() ? 0 : 1,
                           .restart = one.restart ? 1 : 0,
                           .num_tokens = one.tokens.has_value() ? std::ssize(*one.tokens) : 0,
                           .tokens = one.tokens.has_value() ? one.tokens->data() : nullptr});
    list_pages(k, std::move(layer.pages));
    kvkeep_layer_report found{};
    found.num_prompts = std::ssize(k.prompts);
    found.num_pages = std::ssize(k.pages);
    found.prompts = k.prompts.data();
    found.pages = k.pages.data();
    give_back(found, report);
  });
}

kvkeep_status kvkeep_logical_length(const kvkeep_keeper* keeper, int64_t sequence, int64_t* tokens) {
  return guarded([&] { required(tokens, "tokens") = required(keeper, "keeper").keeper.logical_length(sequence); });
}
kvkeep_status kvkeep_physical_length(const kvkeep_keeper* keeper, int64_t sequence, int32_t layer, int32_t head,
                                     int32_t* slots) {
  return guarded(
      [&] { required(slots, "slots") = required(keeper, "keeper").keeper.physical_length(sequence, layer, head); });
}
kvkeep_status kvkeep_positions(const kvkeep_keeper* keeper, int64_t sequence, int32_t layer, int32_t head,
                               const int32_t** positions, int64_t* count) {
  return guarded([&] {
    const std::span<const std::int32_t> held = required(keeper, "keeper").keeper.positions(sequence, layer, head);
    required(positions, "positions") = held.data();
    required(count, "count") = std::ssize(held);
  });
}
kvkeep_status kvkeep_rollback_limit(const kvkeep_keeper* keeper, int64_t sequence, int64_t* tokens) {
  return guarded([&] { required(tokens, "tokens") = required(keeper, "keeper").keeper.rollback_limit(sequence); });
}
kvkeep_status kvkeep_whole_prefix(const kvkeep_keeper* keeper, int64_t sequence, int64_t* tokens) {
  return guarded([&] { required(tokens, "tokens") = required(keeper, "keeper").keeper.whole_prefix(sequence); });
}
kvkeep_status kvkeep_evicted(const kvkeep_keeper* keeper, int64_t sequence, int64_t* tokens) {
  return guarded([&] { required(tokens, "tokens") = required(keeper, "keeper").keeper.evicted(sequence); });
}
kvkeep_status kvkeep_tokens_to_event(const kvkeep_keeper* keeper, int64_t sequence, int64_t* tokens) {
  return guarded([&] { required(tokens, "tokens") = required(keeper, "keeper").keeper.tokens_to_event(sequence); });
}
kvkeep_status kvkeep_queries_read(const kvkeep_keeper* keeper, int64_t* queries) {
  return guarded([&] { required(queries, "queries") = required(keeper, "keeper").keeper.queries_read(); });
}

kvkeep_status kvkeep_length_after(const kvkeep_keeper* keeper, int64_t sequence, const int32_t* tokens, size_t steps,
                                  int32_t* length, int32_t* event, int32_t* exact) {
  return guarded([&] {
    std::int32_t& to = required(length, "length");
    LengthForecast ahead = required(keeper, "keeper").keeper.forecast(sequence);
    ahead.step(array(tokens, static_cast<std::int64_t>(steps), "tokens"));
    to = ahead.length();
    if (event != nullptr) *event = ahead.event() ? 1 : 0;
    if (exact != nullptr) *exact = ahead.exact() ? 1 : 0;
  });
}

kvkeep_status kvkeep_pages_needed(const kvkeep_keeper* keeper, int64_t sequence, const int32_t* tokens, size_t steps,
                                  int32_t page_size, int32_t shared_pages, int32_t last_shared, int32_t* append,
                                  int32_t* event) {
  return guarded([&] {
    std::int32_t &to_append = required(append, "append"), &to_event = required(event, "event");
    const PageNeed need =
        required(keeper, "keeper")
            .keeper.forecast(sequence)
            .need(std::span<const std::int32_t>(array(tokens, static_cast<std::int64_t>(steps), "tokens")), page_size,
                  shared_pages, last_shared != 0);
    to_append = need.append, to_event = need.event;
  });
}

kvkeep_status kvkeep_copy_rows(kvkeep_keeper* keeper, const kvkeep_cache* cache, int64_t index, const void** bytes,
                               size_t* count) {
  return guarded([&] {
    kvkeep_keeper& k = required(keeper, "keeper");
    const View view(cache, k.keeper.spec());
    give_bytes(k, bytes, count, [&] {
      return copy_rows(k.keeper.spec(), k.keeper.layers(), view.view, static_cast<std::size_t>(index), k.memory());
    });
  });
}

kvkeep_status kvkeep_restore_rows(kvkeep_keeper* keeper, const kvkeep_cache* cache, int64_t index, const void* bytes,
                                  size_t count) {
  return guarded([&] {
    const kvkeep_keeper& k = required(keeper, "keeper");
    const View view(cache, k.keeper.spec());
    restore_rows(k.keeper.spec(), k.keeper.layers(), view.view, static_cast<std::size_t>(index), bytes_of(bytes, count),
                 k.memory());
  });
}

}  // extern "C"

}  // namespace kvkeep
