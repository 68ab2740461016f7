// SPDX-License-Identifier: Apache-2.0
#include "event.h"

#include <algorithm>
#include <functional>
#include <memory>

#include "share.h"
#include "window_attention.h"

namespace kvkeep::cuda {

Element element_of(const char* what, Dtype dtype) {
  switch (dtype) {
    case Dtype::f32:
      return Element::f32;
    case Dtype::f16:
      return Element::f16;
    case Dtype::bf16:
      return Element::bf16;
    default:
      refuse<Unsupported>("decide: ", what, " are ", dtype, "; allowed f32, f16, bf16");
  }
}

namespace {

/// One side of the cache. scales: of that side of a row.
Element element_of_side(const char* what, Dtype dtype, std::int32_t rotated, const RowTable& table,
                        SlotAddress Row::* scales) {
  KVKEEP_REQUIRE_AS(Unsupported, rotated == 0, "decide: ", what, " are rotated in runs of ", rotated,
                    "; allowed as they are, or on the CPU");
  Element element{};
  switch (dtype) {
    case Dtype::f8_e4m3:
      element = Element::f8_e4m3;
      break;
    case Dtype::f8_e5m2:
      element = Element::f8_e5m2;
      break;
    case Dtype::i8:
      element = Element::i8;
      break;
    default:
      KVKEEP_REQUIRE_AS(Unsupported, is_scorable(dtype), "decide: ", what, " are ", dtype,
                        "; allowed f32, f16, bf16 and, with f32 scales, f8_e4m3, f8_e5m2, i8");
      return element_of(what, dtype);
  }
  for (const Row& row : table.rows)
    KVKEEP_REQUIRE_AS(Unsupported, (row.*scales).width == 4, "decide: ", what, " of layer ", row.layer, " are ", dtype,
                      " without f32 scales; allowed with one f32 scale per slot");
  return element;
}

}  // namespace

Element element_of_keys(const RowTable& table) {
  return element_of_side("keys", table.key_dtype, table.keys_rotated, table, &Row::key_scales);
}
Element element_of_values(const RowTable& table) {
  return element_of_side("values", table.value_dtype, table.values_rotated, table, &Row::value_scales);
}

void EventMemory::begin_counting() {
  counting_ = true;
  counted_ = 0;
}

void EventMemory::retire_all() {
  for (Block& block : blocks_) pool_.retire(std::move(block.memory));
  blocks_.clear();
}

void EventMemory::replace_all(std::int64_t bytes) {
  retire_all();
  const std::int64_t size = std::max(bytes + bytes / 2, kLeastBlock);
  blocks_.push_back({.memory = pool_.allocate(size), .bytes = size});
}

void EventMemory::begin() {
  counting_ = false;
  if (blocks_.size() > 1) replace_all(most_);
  for (Block& block : blocks_) block.used = 0;
}

namespace {

/// Rows of a table, slots if all were as long as the longest, and the most queries held: what workspaces grow with.
std::array<std::int64_t, 3> extent_of(const RowTable& table) {
  std::int64_t longest = 0, queries = 0;
  for (const Row& row : table.rows) longest = std::max<std::int64_t>(longest, row.length);
  for (const RowGroup& group : table.groups) queries = std::max<std::int64_t>(queries, group.queries.count);
  return {std::ssize(table.rows), std::ssize(table.rows) * longest, queries};
}

}  // namespace

bool EventMemory::has_served(const RowTable& table) const {
  return std::ranges::equal(extent_of(table), most_extent_, std::less_equal<>());
}

void EventMemory::reserve(std::int64_t bytes, const RowTable& table) {
  std::ranges::transform(extent_of(table), most_extent_, most_extent_.begin(),
                         [](std::int64_t one, std::int64_t most) { return std::max(one, most); });
  counting_ = false;
  if (blocks_.size() != 1 || blocks_.front().bytes < bytes) replace_all(bytes);
}

std::byte* EventMemory::take(std::int64_t bytes) {
  constexpr std::int64_t kAlignment = 256;
  bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (counting_) {
    counted_ += bytes;
    return nullptr;
  }
  if (blocks_.empty() || blocks_.back().used + bytes > blocks_.back().bytes) {
    const std::int64_t size = std::max(bytes, kLeastBlock);
    blocks_.push_back({.memory = pool_.allocate(size), .bytes = size});
  }
  Block& block = blocks_.back();
  std::byte* piece = static_cast<std::byte*>(block.memory.get()) + block.used;
  block.used += bytes;
  std::int64_t used = 0;
  for (const Block& each : blocks_) used += each.used;
  most_ = std::max(most_, used);
  return piece;
}

void EventMemory::use(Tensor memory) {
  KVKEEP_REQUIRE(
      memory.defined() && memory.device() == pool_.device() && memory.is_contiguous() && memory.dtype() == Dtype::u8,
      "workspace: not usable; given ", memory.dtype(), " ", memory.sizes(), " on ", memory.device().str(),
      "; allowed a contiguous u8 tensor on ", pool_.device().str());
  KVKEEP_REQUIRE(reinterpret_cast<std::uintptr_t>(memory.bytes()) % 256 == 0,
                 "workspace: not aligned; allowed an address that is a multiple of 256 bytes");
  retire_all();
  given_ = memory.numel();
  void* const data = memory.bytes();
  auto held = std::make_unique<Tensor>(std::move(memory));
  blocks_.push_back(
      {.memory = {data, {held.release(), [](void* tensor) { delete static_cast<Tensor*>(tensor); }}}, .bytes = given_});
}

void DeviceTable::place() {
  const auto bytes = static_cast<std::int64_t>(image_.size());
  if (bytes <= capacity_) return;
  const std::int64_t capacity = bytes + bytes / 2;
  pool_.retire(std::exchange(memory_, pool_.allocate(capacity)));
  capacity_ = capacity;
  sent_.clear();
}

void DeviceTable::upload(Staging& staging, Stream stream) {
  if (image_ == sent_ && !pool_.captured()) return;
  staging.upload(memory_.get(), image_.data(), image_.size(), stream);
  sent_ = image_;
}

Blas* EventBlas::use(bool dry) {
  if (!Blas::why_not().empty()) return nullptr;
  if (dry || blas_.is_open()) return &blas_;
  KVKEEP_REQUIRE_AS(StateError, !is_capturing(pool_.current()),
                    "decide: the first event that multiplies with cuBLAS makes its handle, for which the device is "
                    "waited for; allowed in a capture once such an event has run");
  constexpr std::int64_t kAlignment = 256;
  if (!workspace_) workspace_ = pool_.allocate(Blas::kWorkspace + kAlignment);
  std::size_t room = Blas::kWorkspace + kAlignment;
  void* workspace = workspace_.get();
  blas_.open(std::align(kAlignment, Blas::kWorkspace, workspace, room));
  return &blas_;
}

std::vector<std::int32_t> most_kept(const RowTable& table, const Limits& limits) {
  std::vector<std::int32_t> most;
  for (std::size_t r = 0; r < table.rows.size(); ++r) {
    const std::int32_t length = table.rows[r].length;
    most.push_back(limits.rows[r].due ? std::min(length, limits.rows[r].budget) : length);
  }
  return most;
}

CudaEvent::CudaEvent(const Evidence& given, const Limits& limits_given, DevicePool& pool, EventMemory& memory,
                     Staging& staging, Constants& constants, EventBlas& blas, bool dry)
    : evidence(given),
      limits(limits_given),
      scope_(pool.device().index),
      pool_(pool),
      memory_(memory),
      staging_(staging),
      constants_(constants),
      blas_(blas),
      stream_(pool.stream()),
      dry_(dry) {}

WindowAttention CudaEvent::attend(std::int32_t window, bool official, WindowNeeds needs) {
  asked_ = ask(window, official);
  WindowAttention seen;
  if (needs.usage) seen.usage = tensor(flat(), evidence.table.slots);
  if (needs.newest) seen.newest = tensor(flat(), evidence.table.slots);
  attend(asked_, needs.usage ? seen.usage.data<float>() : nullptr, needs.newest ? seen.newest.data<float>() : nullptr);
  return seen;
}

Scores CudaEvent::score(const Scorer& scorer, const WindowAttention& seen) {
  // Others settle them with their own queries, unless limits, which any kernel may read, come with them.
  if (scorer.needs().queries == 0 || pins != nullptr) settle_positions();
  Scores scores{tensor(kernels_of(scorer)(*this, scorer, seen), evidence.table.slots)};
  settle_positions();
  return scores;
}

Scores CudaEvent::share(const Scores& scores, Sharing share) {
  const SharedRows sharing = shared_rows(evidence, limits, share);
  Scores shared{tensor(flat(), evidence.table.slots)};
  launch(launch_share, ShareArguments{.rows = arguments.rows,
                                      .limits = arguments.limits,
                                      .sharing = sharing,
                                      .longest = arguments.longest,
                                      .scores = scores.data.data<float>(),
                                      .shared = shared.data.data<float>()});
  return shared;
}

void CudaEvent::allot(const Allocator& allotting, const Scores& scores, WindowAttention seen, Decision& decision) {
  KVKEEP_REQUIRE(&allotting == allocator, "allot: ", allotting.name(),
                 " is not what the event was begun with; allowed Demand::allocator, ", allocator->name());
  const std::int64_t kept = keep.indptr.back();
  keep.slots = tensor(take<std::int32_t>(kept), kept, Dtype::i32);
  float* const credit =
      kernels_of(allotting)->allot(*this, allotting, seen, scores.data.data<float>(), keep.slots.data<std::int32_t>());
  if (credit != nullptr) decision.credit = tensor(credit, evidence.table.slots);
  decision.keep = std::move(keep);
  decision.tables = tables;
}

Tensor CudaEvent::tensor(void* data, std::int64_t count, Dtype dtype) const {
  return {data, dtype, Shape{count}, pool_.device()};
}

PrepareArguments CudaEvent::prepare_arguments() const {
  PrepareArguments prepare;
  prepare.evidence = arguments;
  prepare.newest = newest_positions;
  if (newest_positions != nullptr) {
    prepare.pins = pins;
    prepare.given = given_limits;
    prepare.settled = settled_limits;
  }
  return prepare;
}

DeviceWindow CudaEvent::ask(std::int32_t window, bool official, Reader reader, bool fresh) {
  const auto groups = static_cast<std::int64_t>(evidence.table.groups.size());
  const bool turned = evidence.basis == QueryBasis::post_rope;
  DeviceWindow asked{window, official, take<RowWindow>(arguments.count)};
  if (!turned || reader != Reader::attention || !window_attention_reads_views(arguments, window))
    asked.queries = take<float>(groups * evidence.spec.query_heads * window * evidence.spec.key_dim);
  const bool normalised = std::ranges::all_of(evidence.table.groups, [window](const RowGroup& group) {
    return group.queries.normalised >= std::min(window, group.queries.count);
  });
  if (normalised) asked.normalisers = take<float>(groups * evidence.spec.query_heads * window);
  PrepareArguments prepare = prepare_arguments();
  prepare.window = window;
  prepare.official = official;
  prepare.fresh = fresh;
  prepare.windows = asked.windows;
  prepare.queries = asked.queries;
  prepare.normalisers = asked.normalisers;
  prepare.turn = !turned && arguments.ropes != nullptr;
  launch(launch_prepare, prepare);
  newest_positions = nullptr;
  return asked;
}

void CudaEvent::settle_positions() {
  if (newest_positions == nullptr) return;
  launch(launch_prepare, prepare_arguments());
  newest_positions = nullptr;
}

void CudaEvent::attend(const DeviceWindow& window, float* usage, float* newest, float* sum) const {
  WindowAttentionArguments attention;
  attention.evidence = arguments;
  attention.windows = window.windows;
  attention.window = window.window;
  attention.queries = window.queries;
  attention.log_sum_exp = window.normalisers;
  attention.usage = usage;
  attention.newest = newest;
  attention.sum = sum;
  if (sum != nullptr) attention.evidence.limits = nullptr;
  attention.workspace = take<std::byte>(window_attention_workspace_bytes(arguments, window.window));
  launch(launch_window_attention, attention);
}

float* CudaEvent::attend_history(const DeviceWindow& window, const WindowReading& reading) const {
  HistoryAttentionArguments attention;
  attention.evidence = arguments;
  attention.windows = window.windows;
  attention.queries = window.queries;
  attention.reading = reading;
  attention.out = flat();
  attention.workspace = take<std::byte>(history_attention_workspace_bytes(arguments, reading));
  launch(launch_history_attention, attention);
  return attention.out;
}

}  // namespace kvkeep::cuda
