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
#include "kvkeep/allot/mass_segmented.h"
#include "kvkeep/allot/threshold.h"

namespace kvkeep::cuda {
namespace {

/// Brings what a turn opens, as far as it is missing, into the arenas.
void bring(const auto& turn, Stream stream) {
  launch_memory_pieces(turn.a, turn.pieces, turn.counts, stream);
  launch_fetch({.pieces = turn.pieces, .counts = turn.counts, .lists = turn.a.count, .stride = turn.a.most_spans},
               stream);
}

constexpr std::int32_t kMostDim = 256, kMostWidth = 128;  ///< that kernels factorise

/// Of a sequence that has folded.
const DeviceRows& device_rows(const FoldedRows& rows) { return *static_cast<const DeviceRows*>(rows.on_device.get()); }

std::int32_t most_spans(const FoldedRows& rows) {
  std::int32_t most = 0;
  for (const FoldedRows::Count& count : rows.counts()) most = std::max(most, count.spans);
  return most;
}

}  // namespace

std::vector<std::string> memory_problems(const MemoryOptions& memory, const ModelSpec& spec, Device device) {
  std::vector<std::string> found;
  const auto add = [&](const auto&... what) { found.push_back(text(what..., " on ", device.str())); };
  if (memory.learned()) add("memory: a learned router has no kernel; allowed zoom=mass");
  if (!memory.learned() && memory.zoom.rule == ZoomOptions::Rule::coverage)
    add("memory: zoom=coverage has no kernel; allowed zoom=mass");
  if (memory.factors.rank == FactorOptions::Rank::gates)
    add("memory: rank=gates has no kernel; allowed rank energy or max");
  if (spec.key_dim > kMostDim) add("key_dim: folded spans of ", spec.key_dim, " numbers; allowed up to ", kMostDim);
  return found;
}

std::vector<std::string> fold_problems(const Demand& demand, const ModelSpec& spec, Device device) {
  std::vector<std::string> found;
  if (!demand.rest) return found;
  const std::type_info& type = typeid(demand.allocator);
  if (type == typeid(MassSegmented))
    found.push_back(text("rest: fold over ", demand.policy, " cuts spans at the ends of segments, which the host does ",
                         "not know; given ", device.str(),
                         "; allowed drop, an allocator without segments, or the CPU"));
  if (type == typeid(AdaptiveHeads) || type == typeid(Threshold) ||
      (type == typeid(Critical) && demand.allocator.ragged()))
    found.push_back(text("rest: under ", demand.policy, " the scores decide how many slots fold, unknown to the host; ",
                         "given fold on ", device.str(), "; allowed drop, or the CPU"));
  if (spec.key_dim > kMostWidth && demand.rest->max_span > kMostWidth)
    found.push_back(text("memory.max_span: spans of ", demand.rest->max_span, " slots with keys of ", spec.key_dim,
                         " numbers; allowed up to ", kMostWidth, " of one of them on ", device.str()));
  const std::int32_t dim = std::max(spec.key_dim, spec.value_dim);
  if (std::min<std::int64_t>(demand.rest->max_span, dim) > kMostWidth) return found;
  const std::size_t needed = factorise_shared_bytes(demand.rest->max_span, dim), most = most_shared_bytes(device.index);
  if (needed > most)
    found.push_back(text("memory.max_span: a span of ", demand.rest->max_span, " slots of ", dim, " numbers takes ",
                         needed >> 10, " KiB of shared memory to decompose; given ", device.str(), " with ", most >> 10,
                         "; allowed shorter spans, or the CPU"));
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
  for (const Array& array : arrays) fresh.push_back(memory_.allocate(rows * larger * array.bytes));
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
                         MachineMemory& machine, Staging& staging, std::function<void(const Decision&)> require_newest)
    : FoldedMemory(spec, memory, machine),
      options_(memory.fold_options()),
      bounds_(bounds),
      pool_(pool),
      machine_(machine),
      staging_(staging),
      require_newest_(std::move(require_newest)),
      far_(memory.host_bytes),
      leaving_(pool),
      work_(pool),
      fold_table_(pool),
      view_table_(pool) {}

DeviceRows& DeviceFolds::rows_of(FoldedRows& sequence) {
  if (sequence.on_device == nullptr)
    sequence.on_device = std::make_shared<DeviceRows>(sequence, spec_.group(), spec_.key_dim, options_.store,
                                                      options_.sketch, machine_, ++serial_);
  return *static_cast<DeviceRows*>(sequence.on_device.get());
}

void DeviceFolds::require_no_capture(const char* operation) const {
  KVKEEP_REQUIRE_AS(StateError, !is_capturing(pool_.current()), operation,
                    ": the stream is being captured, and folded spans differ from step to step; allowed outside of a "
                    "capture");
}

Folding DeviceFolds::fold(const RowTable& table, const Decision& decision, std::span<const FoldTarget> targets) {
  const DeviceScope scope(pool_.device().index);
  require_newest_(decision);
  require_no_capture("fold");
  wait_for_ahead();
  const Fold& fold = *decision.fold;
  KVKEEP_REQUIRE_AS(Unsupported, !fold.listed && decision.tables.rows != nullptr,
                    "fold: the policy lists slots on the host, but the cache is on ", pool_.device().str(),
                    "; allowed all that a row drops (fold_rest)");
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
  for (std::size_t r = 0; r < table.rows.size(); ++r) {
    const auto first = static_cast<std::size_t>(fold.indptr[r]), last = static_cast<std::size_t>(fold.indptr[r + 1]);
    const auto spans = static_cast<std::int32_t>(last - first);
    const auto dropped = static_cast<std::int32_t>(fold.spans[last] - fold.spans[first]);
    if (dropped == 0) continue;
    FoldedRows& sequence = *targets[r].sequence;
    std::int64_t length = 0;  // of the longest span
    for (std::size_t s = first; s < last; ++s) length = std::max(length, fold.spans[s + 1] - fold.spans[s]);
    rows.push_back({.row = static_cast<std::int32_t>(r),
                    .first_span = all.spans,
                    .first_slot = slots,
                    .blob_bytes = folded_blob_bytes(length, spec_.key_dim, options_, store)});
    for (std::size_t s = first; s < last; ++s)
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
  const std::int64_t rows_at = fold_table_.add(rows), pieces_at = fold_table_.add(pieces);
  fold_table_.place();
  fold_table_.upload(staging_, stream);
  work_.begin();
  all.folding = fold_table_.there<FoldingRow>(rows_at);
  all.count = static_cast<std::int32_t>(rows.size());
  all.pieces = fold_table_.there<FoldingSpan>(pieces_at);
  all.rows = decision.tables.rows;
  all.kept = decision.keep->slots.data<std::int32_t>();
  all.indptr = decision.tables.indptr;
  all.slots = reinterpret_cast<std::int32_t*>(work_.take(slots * 4));
  all.dim = spec_.key_dim;
  all.keys = element_of("keys", table.key_dtype);
  all.store = store;
  launch_folds(all, all.spans, longest, element_of("values", table.value_dtype), stream);
  return folding;
}

/// Some spans after the others, in memory that does not grow with their number.
void DeviceFolds::launch_folds(const FoldArguments& all, std::int32_t spans, std::int64_t longest, Element values,
                               Stream stream) {
  const std::int64_t width = element_size(options_.store), dim = spec_.key_dim,
                     numbers = folded_blob_bytes(longest, dim, options_, all.store) / (2 * width),
                     of_span = 2 * ((numbers + dim) * width +
                                    static_cast<std::int64_t>(sizeof(RowMatrix) + sizeof(FactorsFound)));
  const auto together = static_cast<std::int32_t>(std::clamp<std::int64_t>(bounds_.matrix_bytes / of_span, 1, spans));
  const auto take = [this](std::int64_t bytes) { return work_.take(bytes); };
  FoldArguments a = all;
  a.numbers = numbers;
  a.matrices = reinterpret_cast<RowMatrix*>(take(2 * together * static_cast<std::int64_t>(sizeof(RowMatrix))));
  auto* const found =
      reinterpret_cast<FactorsFound*>(take(2 * together * static_cast<std::int64_t>(sizeof(FactorsFound))));
  std::byte *const coarse = take(2 * together * dim * width), *const factors = take(2 * together * numbers * width);
  a.found = found, a.coarse = coarse, a.factors = factors;
  launch_fold_slots(a, stream);
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
    if (values != a.keys) {  // one dtype per launch
      matrices.count = a.spans;
      launch_factorise(matrices, stream);
      matrices.matrices += a.spans;
      matrices.found += a.spans;
      matrices.coarse += a.spans * dim * width;
      matrices.element = values;
    }
    launch_factorise(matrices, stream);
    launch_fold_spans(a, stream);
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
                     of_token = heads * (13 * std::int64_t{step.most_spans} + 4 * (spec_.key_dim + 2)) +
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
          own.resident =
              static_cast<double>(reader.columns->length(row)) +
              memory_.entries_per_span(spec_.group(), spec_.key_dim, false) * static_cast<double>(count.spans) +
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
  a.mass = memory_.zoom.mass;
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
  a.workspace = work_.take(memory_attention_workspace_bytes(a));
  return turn;
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
    if (turn.a.late)
      launch_memory_open(turn.a, stream);
    else
      launch_memory_route(turn.a, stream);
    bring(turn, stream);
    launch_memory_merge(turn.a, stream);
  }
  return {};
}

}  // namespace kvkeep::cuda
