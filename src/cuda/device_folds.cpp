// SPDX-License-Identifier: Apache-2.0
#include "device_folds.h"

#include <algorithm>
#include <map>
#include <typeinfo>

#include "factorise.h"
#include "fetch.h"
#include "fold.h"
#include "kvkeep/allot/adaptive_heads.h"
#include "kvkeep/allot/critical.h"
#include "kvkeep/allot/threshold.h"
#include "kvkeep/memory/segmenter.h"

namespace kvkeep::cuda {
namespace {

/// Brings what a turn opens, as far as it is missing, into the arenas.
void bring(const auto& turn, Stream stream) {
  launch_memory_pieces(turn.a, turn.pieces, turn.counts, stream);
  launch_fetch({.pieces = turn.pieces, .counts = turn.counts, .lists = turn.a.count, .stride = turn.a.most_spans},
               stream);
}

constexpr std::int32_t kMostWidth = 128;  ///< that kernels factorise

/// Of a sequence that has folded.
const DeviceRows& device_rows(const FoldedRows& rows) { return *static_cast<const DeviceRows*>(rows.on_device.get()); }

std::int32_t most_spans(const FoldedRows& rows) {
  std::int32_t most = 0;
  for (const FoldedRows::Count& count : rows.counts()) most = std::max(most, count.spans);
  return most;
}

/// Slots that the host has listed, and their weights in the coarse entries, as kernels read them. Rows of a sequence
/// that fold the same share one list.
class SlotLists {
 public:
  explicit SlotLists(const Fold& fold) : fold_(fold) {}

  /// The slots of spans [first, last), of a row of `sequence`. Returns where they are.
  std::int64_t add(const FoldedRows* sequence, std::size_t first, std::size_t last) {
    const std::int64_t begin = fold_.spans[first], end = fold_.spans[last];
    const auto [found, fresh] = newest_.try_emplace(sequence);
    List& list = found->second;
    if (!fresh && is_same(list, first, last)) return list.at;
    list = {first, last, std::ssize(slots_)};
    slots_.insert(slots_.end(), fold_.slots.begin() + begin, fold_.slots.begin() + end);
    for (std::size_t s = first; s < last && !fold_.weights.empty(); ++s)
      for (const double share :
           span_weights(std::span(fold_.weights)
                            .subspan(static_cast<std::size_t>(fold_.spans[s]),
                                     static_cast<std::size_t>(fold_.spans[s + 1] - fold_.spans[s]))))
        weights_.push_back(static_cast<float>(share));
    return list.at;
  }

  [[nodiscard]] const std::vector<std::int32_t>& slots() const { return slots_; }
  [[nodiscard]] const std::vector<float>& weights() const { return weights_; }  ///< empty: all equal

 private:
  struct List {
    std::size_t first = 0, last = 0;  ///< spans
    std::int64_t at = 0;
  };
  /// The spans are as long, and have the same slots and weights.
  [[nodiscard]] bool is_same(const List& list, std::size_t first, std::size_t last) const {
    if (last - first != list.last - list.first) return false;
    const std::int64_t mine = fold_.spans[first], own = fold_.spans[list.first];
    for (std::size_t s = 0; s <= last - first; ++s)
      if (fold_.spans[first + s] - mine != fold_.spans[list.first + s] - own) return false;
    const auto same = [&](const auto& all) {
      return all.empty() || std::equal(all.begin() + mine, all.begin() + fold_.spans[last], all.begin() + own);
    };
    return same(fold_.slots) && same(fold_.weights);
  }

  const Fold& fold_;
  std::map<const FoldedRows*, List> newest_;
  std::vector<std::int32_t> slots_;
  std::vector<float> weights_;
};

/// FactorGates::numbers()
std::int64_t gate_numbers(const MemoryOptions* memory) {
  if (memory == nullptr || memory->gates() == nullptr) return 0;
  const RankGates& gates = *memory->gates();
  std::int64_t numbers = gates.weights(0).size(1);
  for (std::size_t i = 0; i < 3; ++i) numbers += gates.weights(i).size(0);
  return numbers;
}

}  // namespace

std::vector<std::string> memory_problems(const MemoryOptions& memory, const ModelSpec& spec, Device device) {
  std::vector<std::string> found;
  const auto add = [&](const auto&... what) { found.push_back(text(what..., " on ", device.str())); };
  if (memory.learned() && memory.routing != nullptr && !memory.routing->layers.empty()) {
    const Router& first = memory.routing->layers.front();
    const auto inner = static_cast<std::int32_t>(first.inner());
    for (const Router& router : memory.routing->layers)
      if (router.inner() != first.inner()) {
        add("router: projections of ", router.inner(), " and ", first.inner(), " numbers; allowed one number");
        break;
      }
    const std::size_t needed = router_shared_bytes(inner, spec.key_dim), most = most_shared_bytes(device.index);
    if (needed > most)
      add("router: projections of ", inner, " numbers take ", needed >> 10, " KiB of shared memory; allowed ",
          most >> 10, " KiB");
  }
  if (spec.key_dim > kMostDim) add("key_dim: folded spans of ", spec.key_dim, " numbers; allowed up to ", kMostDim);
  return found;
}

std::vector<std::string> span_problems(std::int32_t max_span, const MemoryOptions* memory, const ModelSpec& spec,
                                       Device device) {
  std::vector<std::string> found;
  const std::int32_t longest = max_span > 0 ? max_span : INT32_MAX;
  if (spec.key_dim > kMostWidth && longest > kMostWidth)
    found.push_back(text("memory.max_span: spans of ", max_span > 0 ? text(longest) : std::string("any number of"),
                         " slots with keys of ", spec.key_dim, " numbers; allowed up to ", kMostWidth,
                         " of one of them on ", device.str()));
  const std::int32_t dim = std::max(spec.key_dim, spec.value_dim);
  if (std::min(longest, dim) > kMostWidth) return found;
  const std::size_t needed = factorise_shared_bytes(longest, dim, gate_numbers(memory)),
                    most = most_shared_bytes(device.index);
  if (needed > most)
    found.push_back(text("memory.max_span: a span of ", std::min(longest, dim), " slots of ", dim, " numbers takes ",
                         needed >> 10, " KiB of shared memory to decompose; given ", device.str(), " with ", most >> 10,
                         "; allowed shorter spans, or the CPU"));
  return found;
}

std::vector<std::string> fold_problems(const Demand& demand, const ModelSpec& spec, Device device) {
  std::vector<std::string> found;
  if (!demand.rest) return found;
  const std::type_info& type = typeid(demand.allocator);
  if (type == typeid(AdaptiveHeads) || type == typeid(Threshold) ||
      (type == typeid(Critical) && demand.allocator.ragged()))
    found.push_back(text("rest: under ", demand.policy, " the scores decide how many slots fold, unknown to the host; ",
                         "given fold on ", device.str(), "; allowed drop, or the CPU"));
  for (std::string& one : span_problems(demand.rest->max_span, demand.memory, spec, device))
    found.push_back(std::move(one));
  return found;
}

LeavingRooms::~LeavingRooms() {
  try {
    mark();
    for (const Leaving& one : leaving_)
      for (const auto& each : one.marks) each->wait();
  } catch (const DeviceError&) {  // the device is gone, and with it whatever used the memory
  }
}

void LeavingRooms::mark() {
  if (unmarked_.empty()) return;
  const DeviceScope scope(pool_.device().index);
  std::vector<std::unique_ptr<StreamMark>> marks;
  for (const Stream stream : pool_.used()) {
    if (is_capturing(stream)) return;
    marks.push_back(std::make_unique<StreamMark>(stream));
  }
  leaving_.push_back({std::exchange(unmarked_, {}), std::move(marks)});
}

void LeavingRooms::sweep() {
  mark();
  while (!leaving_.empty() &&
         std::ranges::all_of(leaving_.front().marks, [](const auto& each) { return each->reached(); }))
    leaving_.pop_front();
}

void DeviceRows::grow(std::int64_t& capacity, std::int64_t wanted, std::span<Array> arrays) {
  if (wanted <= capacity) return;
  constexpr std::int64_t kLeast = 16;
  const std::int64_t larger = std::max({wanted, capacity + capacity / 2, kLeast}), rows = std::ssize(counted_.counts());
  std::vector<DeviceMemory> fresh;
  for (const Array& array : arrays)
    fresh.push_back(array.bytes == 0 ? DeviceMemory() : memory_.allocate(rows * larger * array.bytes));
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    Array& array = arrays[i];
    if (array.memory != nullptr)
      memory_.copy_rows(fresh[i].get(), larger * array.bytes, array.memory.get(), capacity * array.bytes,
                        capacity * array.bytes, rows);
    array.memory = std::move(fresh[i]);
  }
  capacity = larger;
  ++moves_;
}

void DeviceRows::reserve(std::int32_t spans, std::int64_t tokens) {
  if (dense_ == nullptr) {  // before the first query nothing is expected of rows
    const std::vector<float> nothing(counted_.counts().size() * static_cast<std::size_t>(group_),
                                     -std::numeric_limits<float>::infinity());
    const auto bytes = static_cast<std::int64_t>(nothing.size() * sizeof(float));
    DeviceMemory fresh = memory_.allocate(bytes);
    memory_.write(fresh.get(), nothing.data(), bytes);
    dense_ = std::move(fresh);
  }
  grow(span_room_, spans, of_spans_);
  if (words_ > 0) grow(block_room_, KeySketch::padded(tokens) / KeySketch::kBlock, of_blocks_);
}

template <class Row>
void DeviceRows::point(Row& out, std::int32_t row, std::int32_t span) const {
  const auto set = [&](auto& to, const Array& array, std::int64_t room, std::int64_t first) {
    to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(at(array, room, row, first));
  };
  set(out.table, of_spans_[kTable], span_room_, span);
  set(out.coarse_keys, of_spans_[kCoarseKeys], span_room_, span);
  set(out.coarse_values, of_spans_[kCoarseValues], span_room_, span);
  set(out.log_length, of_spans_[kLogLength], span_room_, span);
  set(out.far, of_spans_[kFar], span_room_, span);
  if (norms_ > 0) set(out.norms, of_spans_[kNorms], span_room_, span);
  if (words_ == 0) return;
  set(out.signs, of_blocks_[kSigns], block_room_, 0);
  set(out.sizes, of_blocks_[kSizes], block_room_, 0);
}

void DeviceRows::describe_end(std::int32_t row, FoldingRow& out) const {
  const FoldedRows::Count& own = counted_.count(row);
  out.first_token = own.tokens;
  point(out, row, own.spans);
}

void DeviceRows::describe(std::int32_t row, FoldedRow& out) const {
  out.spans = counted_.count(row).spans;
  if (out.spans == 0) return;
  point(out, row, 0);
  out.dense = static_cast<float*>(dense_.get()) + std::int64_t{row} * group_;
}

DeviceFolds::DeviceFolds(const ModelSpec& spec, const MemoryOptions& memory, FoldBounds bounds, DevicePool& pool,
                         MachineMemory& machine, Staging& staging, SlotsOf slots_of)
    : FoldedMemory(spec, memory, machine),
      options_(memory.fold_options()),
      bounds_(bounds),
      pool_(pool),
      machine_(machine),
      staging_(staging),
      slots_of_(std::move(slots_of)),
      far_(memory.host_bytes),
      leaving_(pool),
      work_(pool),
      fold_table_(pool),
      view_table_(pool) {}

DeviceRows& DeviceFolds::rows_of(FoldedRows& sequence) {
  if (sequence.on_device == nullptr)
    sequence.on_device = std::make_shared<DeviceRows>(sequence, spec_.group(), spec_.key_dim, options_.store,
                                                      options_.sketch, memory_.learned(), machine_, ++serial_);
  return *static_cast<DeviceRows*>(sequence.on_device.get());
}

const DeviceFolds::Learned* DeviceFolds::learned() {
  const RankGates* const gates = memory_.gates();
  if (learned_ || (!memory_.learned() && gates == nullptr)) return learned_ ? &*learned_ : nullptr;
  Learned own;
  const auto send = [&](std::span<const float> numbers) {
    const auto bytes = static_cast<std::int64_t>(numbers.size_bytes());
    own.memory.push_back(machine_.allocate(bytes));
    machine_.write(own.memory.back().get(), numbers.data(), bytes);
    return static_cast<const float*>(own.memory.back().get());
  };
  if (memory_.learned()) {
    std::vector<float> projections, thresholds;
    const Router& first = memory_.routing->layers.front();
    const std::int64_t of_head = first.inner() * first.key_dim();
    for (const Router& router : memory_.routing->layers)
      for (std::int64_t head = 0; head < router.query_heads(); ++head) {
        projections.insert(projections.end(), router.projection(head), router.projection(head) + of_head);
        thresholds.push_back(router.threshold(head));
      }
    own.router = {send(projections), static_cast<std::int32_t>(first.query_heads()),
                  static_cast<std::int32_t>(first.inner())};
    own.thresholds = send(thresholds);
  }
  for (std::size_t i = 0; gates != nullptr && i < std::size(own.gates.layers); ++i) {
    const auto floats = [&](const Tensor& of) {
      const Tensor wide = as<float>(of);
      return send({wide.data<float>(), static_cast<std::size_t>(wide.numel())});
    };
    own.gates.layers[i] = {floats(gates->weights(i)), floats(gates->biases(i)),
                           static_cast<std::int32_t>(gates->weights(i).size(1)),
                           static_cast<std::int32_t>(gates->weights(i).size(0))};
  }
  return &learned_.emplace(std::move(own));
}

void DeviceFolds::require_no_capture(const char* operation) const {
  KVKEEP_REQUIRE_AS(StateError, !is_capturing(pool_.current()), operation,
                    ": the stream is being captured, and folded spans differ from step to step; allowed outside of a "
                    "capture");
}

Folding DeviceFolds::fold(const RowTable& table, const Decision& decision, std::span<const FoldTarget> targets) {
  const DeviceScope scope(pool_.device().index);
  require_no_capture("fold");
  wait_for_ahead();
  const EventSlots event = slots_of_(table, decision);
  const Fold& fold = *decision.fold;
  for (const Dtype dtype : {table.key_dtype, table.value_dtype})
    KVKEEP_REQUIRE(is_scorable(dtype), "fold: rows are ", dtype, "; allowed f32, f16 or bf16");
  KVKEEP_REQUIRE_AS(Unsupported, table.keys_rotated == 0 && table.values_rotated == 0,
                    "fold: rows are rotated in runs of ", std::max(table.keys_rotated, table.values_rotated),
                    "; allowed as they are, or on the CPU");
  const Element store = element_of("factors", options_.store);

  Folding folding;
  std::vector<FoldingRow> rows;
  std::vector<FoldingSpan> pieces;
  std::map<FoldedRows*, std::int64_t> bytes;  // of blobs, by sequence
  std::map<FoldedRows*, FoldedRows::Count> most;
  FoldArguments all;
  std::int64_t longest = 0, slots = 0;
  SlotLists lists(fold);
  for (std::size_t r = 0; r < table.rows.size(); ++r) {
    const auto first = static_cast<std::size_t>(fold.indptr[r]), last = static_cast<std::size_t>(fold.indptr[r + 1]);
    const auto spans = static_cast<std::int32_t>(last - first);
    const auto dropped = static_cast<std::int32_t>(fold.spans[last] - fold.spans[first]);
    if (dropped == 0) continue;
    FoldedRows& sequence = *targets[r].sequence;
    std::int64_t length = 0;  // of the longest span
    for (std::size_t s = first; s < last; ++s) length = std::max(length, fold.spans[s + 1] - fold.spans[s]);
    if (fold.bounded()) length = std::min<std::int64_t>(length, fold.cut_above);
    rows.push_back({.row = static_cast<std::int32_t>(r),
                    .first_span = all.spans,
                    .spans = spans,
                    .first_slot = fold.listed ? lists.add(&sequence, first, last) : slots,
                    .blob_bytes = folded_blob_bytes(length, spec_.key_dim, options_, store)});
    for (std::size_t s = first; s < last && !fold.bounded(); ++s)
      pieces.emplace_back(static_cast<std::int32_t>(rows.size()) - 1,
                          static_cast<std::int32_t>(fold.spans[s] - fold.spans[first]),
                          static_cast<std::int32_t>(fold.spans[s + 1] - fold.spans[s]));
    const FoldedRows::Count count{spans, dropped};
    folding.tokens += dropped;
    folding.parts.push_back(
        {&sequence, {.row = targets[r].row, .count = count, .near_bytes = rows_of(sequence).near_bytes(count)}});
    all.spans += spans;
    slots += dropped;
    all.longest = std::max(all.longest, table.rows[r].length);
    longest = std::max(longest, length);
    bytes[&sequence] += spans * rows.back().blob_bytes;
    const FoldedRows::Count& had = sequence.count(targets[r].row);
    FoldedRows::Count& needed = most[&sequence];
    needed.spans = std::max(needed.spans, had.spans + spans);
    needed.tokens = std::max(needed.tokens, had.tokens + dropped);
  }
  if (rows.empty()) return folding;

  leaving_.sweep();
  far_bytes_ = far_.bytes();
  std::map<FoldedRows*, std::byte*> blobs;
  for (auto& [sequence, part] : folding.parts) {
    auto [blob, fresh] = blobs.try_emplace(sequence);
    if (!fresh) continue;
    std::unique_ptr<PageLocked::Room> room = far_.room(bytes[sequence]);
    blob->second = room->bytes();
    part.far_bytes = room->size();
    part.far = leaving_.hold(std::move(room));
    sequence->reserve(part);
    folding.far_bytes += part.far_bytes;
    far_bytes_ = far_.bytes();
  }
  for (const auto& [sequence, count] : most) rows_of(*sequence).reserve(count.spans, count.tokens);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto& [sequence, part] = folding.parts[i];
    rows_of(*sequence).describe_end(part.row, rows[i]);
    rows[i].blobs = blobs[sequence];
    blobs[sequence] += part.count.spans * rows[i].blob_bytes;
  }

  const Stream stream = pool_.stream();
  fold_table_.clear();
  const std::int64_t rows_at = fold_table_.add(rows), pieces_at = fold_table_.add(pieces),
                     slots_at = fold_table_.add(lists.slots()), weights_at = fold_table_.add(lists.weights());
  fold_table_.place();
  fold_table_.upload(staging_, stream);
  work_.begin();
  all.folding = fold_table_.there<FoldingRow>(rows_at);
  all.count = static_cast<std::int32_t>(rows.size());
  all.pieces = fold_table_.there<FoldingSpan>(pieces_at);
  all.rows = event.tables.rows;
  all.kept = event.kept;
  all.indptr = event.tables.indptr;
  all.listed = fold.listed;
  all.slots =
      fold.listed ? fold_table_.there<std::int32_t>(slots_at) : reinterpret_cast<std::int32_t*>(work_.take(slots * 4));
  all.weights = lists.weights().empty() ? nullptr : fold_table_.there<float>(weights_at);
  all.dim = spec_.key_dim;
  all.keys = element_of("keys", table.key_dtype);
  all.store = store;
  FoldCut cut;
  if (fold.bounded()) {
    cut = {.ends = decision.tables.ends,
           .most = decision.tables.most_ends,
           .min_span = fold.joined_from,
           .max_span = fold.cut_above,
           .pieces =
               reinterpret_cast<FoldingSpan*>(work_.take(all.spans * static_cast<std::int64_t>(sizeof(FoldingSpan))))};
    if (fold.by_mass) cut.mass = decision.tables.mass, cut.weights = reinterpret_cast<float*>(work_.take(slots * 4));
    all.pieces = cut.pieces, all.weights = cut.weights;
    bounded_ = true;
  }
  launch_folds(all, cut, all.spans, longest, element_of("values", table.value_dtype), stream);
  return folding;
}

/// Some spans after the others, in memory that does not grow with their number.
void DeviceFolds::launch_folds(const FoldArguments& all, const FoldCut& cut, std::int32_t spans, std::int64_t longest,
                               Element values, Stream stream) {
  const Learned* const learned = this->learned();
  const std::int64_t width = element_size(options_.store), dim = spec_.key_dim,
                     numbers = folded_blob_bytes(longest, dim, options_, all.store) / (2 * width),
                     of_span = 2 * ((numbers + dim) * width +
                                    static_cast<std::int64_t>(sizeof(RowMatrix) + sizeof(FactorsFound))) +
                               dim * 4;
  const auto together = static_cast<std::int32_t>(std::clamp<std::int64_t>(bounds_.matrix_bytes / of_span, 1, spans));
  const auto take = [this](std::int64_t bytes) { return work_.take(bytes); };
  FoldArguments a = all;
  a.numbers = numbers;
  a.matrices = reinterpret_cast<RowMatrix*>(take(2 * together * static_cast<std::int64_t>(sizeof(RowMatrix))));
  auto* const found =
      reinterpret_cast<FactorsFound*>(take(2 * together * static_cast<std::int64_t>(sizeof(FactorsFound))));
  std::byte *const coarse = take(2 * together * dim * width), *const factors = take(2 * together * numbers * width);
  a.found = found, a.coarse = coarse, a.factors = factors;
  const bool gated = options_.rank == FactorOptions::Rank::gates;
  auto* const key_means = gated ? reinterpret_cast<float*>(take(together * dim * 4)) : nullptr;
  if (!a.listed) launch_fold_slots(a, stream);
  if (cut.pieces != nullptr) launch_fold_cut(a, cut, stream);
  for (a.first = 0; a.first < spans; a.first += together) {
    a.spans = std::min(together, spans - a.first);
    launch_fold_matrices(a, stream);
    FactoriseArguments matrices{.matrices = a.matrices,
                                .count = 2 * a.spans,
                                .longest = static_cast<std::int32_t>(longest),
                                .dim = a.dim,
                                .element = a.keys,
                                .store = a.store,
                                .options = options_,
                                .found = found,
                                .coarse = coarse,
                                .factors = factors};
    if (gated) matrices.gates = learned->gates, matrices.gates.key_means = key_means, matrices.gates.of_keys = true;
    if (values != a.keys || gated) {  // one dtype per launch; the gates of values read the means of keys
      matrices.count = a.spans;
      launch_factorise(matrices, stream);
      matrices.gates.of_keys = false;
      matrices.matrices += a.spans;
      matrices.found += a.spans;
      matrices.coarse += a.spans * dim * width;
      matrices.element = values;
    }
    launch_factorise(matrices, stream);
    launch_fold_spans(a, stream);
    if (memory_.learned()) launch_router_norms(a, learned->router, static_cast<std::int32_t>(spec_.group()), stream);
  }
}

void DeviceFolds::place_near(std::int64_t bytes) {
  if (bytes <= near_room_) return;
  near_room_ = bytes + bytes / 2;
  pool_.retire(std::exchange(near_, pool_.allocate(near_room_)));
}

/// Sends what the readers read in all layers, unless it is there: called before the first layer that is read.
void DeviceFolds::prepare(const FoldedReading& reading) {
  std::vector<Step::Reader> readers;
  Step step;
  std::int32_t last = 0;
  for (const FoldedReader& reader : reading.readers) {
    const std::int32_t spans = most_spans(*reader.rows);
    readers.emplace_back(spans > 0 ? device_rows(*reader.rows).version() : Step::kUnfolded, reader.seen, reader.first,
                         reader.tokens);
    step.most_spans = std::max(step.most_spans, reader.tokens > 0 ? spans : 0);
    last = std::max(last, reader.first + reader.tokens);
  }
  if (readers == step_.readers) return;
  const std::int64_t heads = spec_.query_heads, kv_heads = spec_.kv_heads,
                     routed = memory_.learned() ? 4 * std::int64_t{spec_.key_dim} : 0,
                     of_token = heads * (13 * std::int64_t{step.most_spans} + 4 * (spec_.key_dim + 2) + routed) +
                                kv_heads * 21 * std::int64_t{step.most_spans};
  const auto tokens =
      static_cast<std::int32_t>(std::clamp<std::int64_t>(bounds_.view_bytes / of_token, 1, std::max(last, 1)));
  const auto layers = static_cast<std::int32_t>(spec_.full_layers().size());
  std::vector<FoldedRow> table;
  std::int64_t most_far = 0;
  std::int32_t most_rows = 0;
  for (std::int32_t first = 0; first < last && step.most_spans > 0; first += tokens) {
    Step::Slice slice{.first = first, .tokens = std::min(tokens, last - first), .at = std::ssize(table)};
    std::int64_t far = 0;
    for (std::int32_t layer = 0; layer < layers; ++layer)
      for (const FoldedReader& reader : reading.readers) {
        const std::int32_t begin = std::max(reader.first, first),
                           end = std::min(reader.first + reader.tokens, first + slice.tokens);
        if (begin >= end || most_spans(*reader.rows) == 0) continue;
        const DeviceRows& rows = device_rows(*reader.rows);
        if (layer == 0) {
          slice.rows += spec_.kv_heads;
          slice.most_queries = std::max(slice.most_queries, end - begin);
          far += reader.rows->state().far_bytes;
        }
        for (std::int32_t head = 0; head < spec_.kv_heads; ++head) {
          const std::int32_t row = layer * spec_.kv_heads + head;
          FoldedRow own{.head = head, .first_query = begin - first, .queries = end - begin};
          rows.describe(row, own);
          const FoldedRows::Count& count = reader.rows->count(row);
          own.entries = memory_.entries_after(reader.seen);
          if (bounded_) own.vacant = memory_.entries_per_span(spec_.group(), spec_.key_dim, memory_.learned());
          own.resident = static_cast<double>(reader.columns->length(row)) +
                         memory_.entries_per_span(spec_.group(), spec_.key_dim, memory_.learned()) *
                             static_cast<double>(count.spans) +
                         memory_.entries_per_token(spec_.key_dim) * static_cast<double>(count.tokens);
          table.push_back(own);
        }
      }
    if (slice.rows == 0) continue;
    most_far = std::max(most_far, far);
    most_rows = std::max(most_rows, slice.rows);
    step.slices.push_back(slice);
  }
  step.readers = std::move(readers);
  step_ = {};  // if something throws from here on
  if (!step.slices.empty()) {
    // Every layer reads with the same arenas and addresses of blobs, one after the other.
    const std::int64_t addresses = std::int64_t{most_rows} * step.most_spans * static_cast<std::int64_t>(sizeof(void*)),
                       arena = std::min(bounds_.near_bytes, most_far) / most_rows / 16 * 16;
    place_near(most_rows * arena + addresses);
    auto* const near = static_cast<std::byte*>(near_.get());
    auto** const blobs = reinterpret_cast<const std::byte**>(near + most_rows * arena);
    for (const Step::Slice& slice : step.slices)
      for (std::int32_t i = 0; i < layers * slice.rows; ++i) {
        FoldedRow& row = table[static_cast<std::size_t>(slice.at + i)];
        row.arena = near + i % slice.rows * arena;
        row.arena_bytes = arena;
        row.near = blobs + std::int64_t{i % slice.rows} * step.most_spans;
      }
    view_table_.clear();
    const std::int64_t at = view_table_.add(table);
    view_table_.place();
    view_table_.upload(staging_, pool_.stream());
    for (Step::Slice& slice : step.slices) slice.at = at + slice.at * static_cast<std::int64_t>(sizeof(FoldedRow));
  }
  step_ = std::move(step);
}

bool DeviceFolds::wait_for_ahead() {
  if (ahead_ == nullptr || !std::exchange(ahead_->pending, false)) return false;
  ahead_->brought.hold(pool_.stream());
  return true;
}

/// Takes the working memory of a turn. `ahead`: it begins before attention over the rows is known.
DeviceFolds::Turn DeviceFolds::turn_of(const FoldedReading& reading, const Step::Slice& slice, bool ahead) {
  const Tensor& queries = reading.queries;
  const auto width = static_cast<std::int64_t>(queries.element_size());
  const std::int64_t spans = step_.most_spans, heads = spec_.query_heads, of_heads = slice.tokens * heads,
                     of_rows = std::int64_t{slice.tokens} * spec_.kv_heads;
  Turn turn;
  MemoryAttentionArguments& a = turn.a;
  a.rows = view_table_.there<FoldedRow>(slice.at) + std::int64_t{reading.index} * slice.rows;
  a.count = slice.rows;
  a.most_spans = step_.most_spans;
  a.most_queries = slice.most_queries;
  a.tokens = slice.tokens;
  a.kv_heads = spec_.kv_heads;
  a.group = spec_.group();
  a.dim = spec_.key_dim;
  a.store = element_of("factors", options_.store);
  a.query = element_of("queries", queries.dtype());
  a.scale = static_cast<float>(spec_.scale());
  a.queries = static_cast<const std::byte*>(queries.bytes()) + slice.first * queries.step(0) * width;
  a.token_stride = queries.step(0) * width;
  a.head_stride = queries.step(1) * width;
  a.keeps_near = false;
  using Rule = MemoryAttentionArguments::Rule;
  a.rule = memory_.learned()                                  ? Rule::learned
           : memory_.zoom.rule == ZoomOptions::Rule::coverage ? Rule::coverage
                                                              : Rule::mass;
  a.mass = memory_.zoom.mass;
  a.coverage = memory_.zoom.coverage;
  a.coverage_floor = memory_.zoom.coverage_floor;
  a.share = memory_.zoom.heads == ZoomOptions::Heads::group;
  a.per_head = memory_.published_budget;
  work_.begin();
  const auto take = [this](auto*& to, std::int64_t count) {
    to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(
        work_.take(count * static_cast<std::int64_t>(sizeof(*to))));
  };
  take(a.marks, of_heads * spans);
  take(a.opened, of_rows * spans);
  take(a.opened_count, of_rows);
  take(turn.pieces, slice.rows * spans);
  take(turn.counts, slice.rows);
  if (ahead) take(a.brought, slice.rows);
  if (a.rule == Rule::learned) {
    take(turn.routed, of_heads * spec_.key_dim);
    a.routed = turn.routed;
    a.thresholds = learned_->thresholds + reading.layer * heads;
    a.inner = learned_->router.inner;
  }
  a.workspace = work_.take(memory_attention_workspace_bytes(a));
  return turn;
}

void DeviceFolds::route_queries(const FoldedReading& reading, const Turn& turn, Stream stream) {
  if (turn.routed != nullptr) launch_router_queries(turn.a, learned_->router, reading.layer, turn.routed, stream);
}

/// The first turn alone: the others need its memory.
void DeviceFolds::prefetch(const FoldedReading& reading) {
  require_no_capture("prefetch");
  wait_for_ahead();
  prepare(reading);
  if (step_.slices.empty()) return;
  const Stream side = pool_.side();
  if (ahead_ == nullptr) ahead_ = std::make_unique<Ahead>(side);
  ahead_->turn = turn_of(reading, step_.slices.front(), true);
  // Queries and tables are there, the last layer has read the arenas, and memory is that of the current stream.
  ahead_->asked.move_to(pool_.stream());
  ahead_->asked.hold(side);
  ahead_->pending = true;
  route_queries(reading, ahead_->turn, side);
  launch_memory_guess(ahead_->turn.a, side);
  bring(ahead_->turn, side);
  ahead_->brought.move_to(side);
}

ReadCounts DeviceFolds::view(const FoldedReading& reading) {
  const DeviceScope scope(pool_.device().index);
  if (reading.attended == nullptr) {
    prefetch(reading);
    return {};
  }
  require_no_capture("view");
  leaving_.mark();
  bool ahead = wait_for_ahead() && reading.announced;
  prepare(reading);
  const Stream stream = pool_.stream();
  for (const Step::Slice& slice : step_.slices) {
    Turn turn = ahead ? ahead_->turn : turn_of(reading, slice, false);
    const std::int64_t first_head = std::int64_t{slice.first} * spec_.query_heads;
    turn.a.out = reading.attended->out.data<float>() + first_head * spec_.value_dim;
    turn.a.lse = reading.attended->log_sum_exp.data<float>() + first_head;
    turn.a.late = std::exchange(ahead, false);
    if (turn.a.late) {
      launch_memory_open(turn.a, stream);
    } else {
      route_queries(reading, turn, stream);
      launch_memory_route(turn.a, stream);
    }
    bring(turn, stream);
    launch_memory_merge(turn.a, stream);
  }
  return {};
}

}  // namespace kvkeep::cuda
