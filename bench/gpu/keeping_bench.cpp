// SPDX-License-Identifier: Apache-2.0
// Kernels that choose slots and move them: compaction, selection, thresholds, AdaKV, AMS, chunks, CriticalKV; and those
// that put queries into their rings, and given scores into their columns.

#include "adaptive_heads.h"

#include <tuple>

#include "arrivals.h"
#include "chunks.h"
#include "compact.h"
#include "critical.h"
#include "kvkeep/allot/divide.h"
#include "mass_segmented.h"
#include "rows.h"
#include "select.h"
#include "share.h"
#include "top_mass.h"

namespace kvkeep::cuda {
namespace {

/// The event's rows, each with its budget, by its scores.
AllottedRows allotted(const RandomEvent& event) {
  return {.rows = event.rows->data(),
          .limits = event.limits->data(),
          .count = static_cast<std::int32_t>(event.count),
          .longest = static_cast<std::int32_t>(event.length),
          .scores = event.scores->data(),
          .indptr = event.bounds->data(),
          .slots = event.slots->data()};
}

void compact(Result& result, Shape shape, Size size) {
  const RandomEvent event(shape, size);
  const CompactArguments arguments{.rows = event.rows->data(),
                                   .columns = nullptr,
                                   .count = static_cast<std::int32_t>(event.count),
                                   .slots = event.slots->data(),
                                   .indptr = event.bounds->data(),
                                   .pages_after = nullptr,
                                   .pages_stride = 0};
  // Every key of a sampled row says where it was.
  const std::int64_t words = event.width / 4;
  std::vector<std::int32_t> tags(static_cast<std::size_t>(event.length * words));
  for (std::size_t i = 0; i < tags.size(); ++i) tags[i] = static_cast<std::int32_t>(i);
  const auto sample = sample_of(static_cast<std::int32_t>(event.count));
  for (const std::int32_t r : sample)
    copy_there(event.cache.data() + r * event.length * event.width, tags.data(), tags.size() * 4);
  launch_compact(arguments, stream());
  for (const std::int32_t r : sample) {
    std::vector<std::int32_t> moved(static_cast<std::size_t>(event.budget * words));
    copy_back(moved.data(), event.cache.data() + r * event.length * event.width, moved.size() * 4);
    for (std::int64_t n = 0; n < event.budget * words; ++n)
      if (moved[static_cast<std::size_t>(n)] !=
          event.kept[static_cast<std::size_t>(r * event.budget + n / words)] * words + n % words)
        return result.fail("a slot holds another slot's bytes");
  }
  measure(result, 2.0 * 2 * static_cast<double>(event.count * event.budget * event.width),
          [&] { launch_compact(arguments, stream()); });
}

void select(Result& result, Shape shape, Size size) {
  const RandomEvent event(shape, size);
  const SelectArguments arguments{allotted(event)};
  launch_select(arguments, stream());
  for (const std::int32_t r : sample_of(arguments.count)) {
    const float* scores = event.drawn.data() + r * event.length;
    std::vector<std::int32_t> want(static_cast<std::size_t>(size.length));
    std::iota(want.begin(), want.end(), 0);
    const auto guarded = [&](std::int32_t t) { return t < kGuarded.sinks || t >= size.length - 32; };
    std::stable_sort(want.begin(), want.end(), [&](std::int32_t x, std::int32_t y) {
      return guarded(x) != guarded(y) ? guarded(x) : scores[x] > scores[y];
    });
    want.resize(static_cast<std::size_t>(size.budget));
    std::sort(want.begin(), want.end());
    if (event.kept_of(r) != want) return result.fail("the kept slots are not those of a sort");
  }
  measure(result, static_cast<double>(event.count) * (size.length + size.budget) * 4,
          [&] { launch_select(arguments, stream()); });
}

/// Room for every slot of every row, where the scores say how many stay.
struct Rooms {
  explicit Rooms(const RandomEvent& event)
      : length(event.length),
        counts(static_cast<std::size_t>(event.count)),
        slots(static_cast<std::size_t>(event.count * event.length)) {
    std::vector<std::int64_t> bounds(static_cast<std::size_t>(event.count) + 1);
    for (std::size_t r = 0; r < bounds.size(); ++r) bounds[r] = static_cast<std::int64_t>(r) * length;
    indptr = std::make_unique<DeviceArray<std::int64_t>>(bounds);
  }
  [[nodiscard]] AllottedRows of(const RandomEvent& event) const {
    AllottedRows rows = allotted(event);
    rows.indptr = indptr->data();
    rows.slots = slots.data();
    return rows;
  }
  [[nodiscard]] std::vector<std::int32_t> kept_of(std::int32_t r) const {
    const std::int32_t kept = counts.download(static_cast<std::size_t>(r), 1)[0];
    return slots.download(static_cast<std::size_t>(r * length), static_cast<std::size_t>(kept));
  }

  std::int64_t length;
  DeviceArray<std::int32_t> counts, slots;
  std::unique_ptr<DeviceArray<std::int64_t>> indptr;
};

void threshold(Result& result, Shape shape, Size size) {
  const RandomEvent event(shape, size);
  const Rooms rooms(event);
  const ThresholdArguments a{rooms.of(event), 1, rooms.counts.data()};  // a sixth of the slots pass
  launch_threshold(a, stream());
  for (const std::int32_t r : sample_of(a.count)) {
    std::vector<std::int32_t> want;
    for (std::int32_t t = 0; t < size.length; ++t)
      if (kGuarded.holds(t, size.length) || event.drawn[static_cast<std::size_t>(r * event.length + t)] >= 1)
        want.push_back(t);
    if (std::ssize(want) <= size.budget && rooms.kept_of(r) != want) return result.fail("not the slots that pass stay");
  }
  measure(result, static_cast<double>(event.count) * (size.length + size.length / 6.0) * 4,
          [&] { launch_threshold(a, stream()); });
}

/// Slots whose scores add up to 32, or all.
void top_mass(Result& result, Shape shape, Size size) {
  const RandomEvent event(shape, size);
  const Rooms rooms(event);
  const TopMassArguments a{rooms.of(event), {.mass = 1, .window = 32}, rooms.counts.data()};
  launch_top_mass(a, stream());
  for (const std::int32_t r : sample_of(a.rows.count)) {
    RowTable row;
    row.rows.resize(1);
    row.rows[0].length = size.length;
    row.slots = size.length;
    const Tensor sums = empty({row.slots}, Dtype::f32);
    std::copy_n(event.drawn.begin() + r * event.length, size.length, sums.data<float>());
    const KeepSet want = keep_top_mass(row, sums, a.options);
    if (rooms.kept_of(r) != std::vector<std::int32_t>(want.row(0).begin(), want.row(0).end()))
      return result.fail("not the slots that hold the mass stay");
  }
  measure(result, static_cast<double>(event.count) * size.length * 4, [&] { launch_top_mass(a, stream()); });
}

/// What the heads of one layer keep, by sorts.
std::vector<std::vector<std::int32_t>> shared_by_heads(const RandomEvent& event, std::int32_t first, std::int32_t heads,
                                                       double safeguard) {
  struct Slot {
    float score;
    std::int32_t head, slot;
  };
  const auto length = static_cast<std::int32_t>(event.length), budget = static_cast<std::int32_t>(event.budget);
  const auto better = [](const Slot& a, const Slot& b) {
    return std::tuple(-a.score, a.head, -a.slot) < std::tuple(-b.score, b.head, -b.slot);
  };
  std::vector<std::vector<std::int32_t>> kept(static_cast<std::size_t>(heads));
  std::vector<Slot> rest;
  for (std::int32_t h = 0; h < heads; ++h) {
    std::vector<Slot> own;
    for (std::int32_t t = 0; t < length; ++t)
      if (kGuarded.holds(t, length))
        kept[static_cast<std::size_t>(h)].push_back(t);
      else
        own.push_back({event.drawn[static_cast<std::size_t>((first + h) * event.length + t)], h, t});
    std::ranges::sort(own, better);
    const auto mine = static_cast<std::size_t>(std::max(0, share_of(safeguard, budget) - kGuarded.count()));
    for (std::size_t n = 0; n < own.size(); ++n)
      if (n < mine)
        kept[static_cast<std::size_t>(h)].push_back(own[n].slot);
      else
        rest.push_back(own[n]);
  }
  std::size_t left = static_cast<std::size_t>(heads) * static_cast<std::size_t>(budget);
  for (const auto& slots : kept) left -= slots.size();
  std::ranges::sort(rest, better);
  for (std::size_t n = 0; n < left; ++n) kept[static_cast<std::size_t>(rest[n].head)].push_back(rest[n].slot);
  for (auto& slots : kept) std::ranges::sort(slots);
  return kept;
}

void adaptive_heads(Result& result, Shape shape, Size size) {
  const RandomEvent event(shape, size);
  const Rooms rooms(event);
  AdaptiveHeadsArguments a{rooms.of(event), shape.kv_heads};
  a.counts = rooms.counts.data();
  const DeviceArray<std::byte> workspace(static_cast<std::size_t>(adaptive_heads_workspace_bytes(a)));
  a.workspace = workspace.data();
  launch_adaptive_heads(a, stream());
  for (const std::int32_t r : sample_of(a.count)) {
    const std::int32_t first = r / a.heads * a.heads;
    if (rooms.kept_of(r) != shared_by_heads(event, first, a.heads, a.safeguard)[static_cast<std::size_t>(r - first)])
      return result.fail("the kept slots are not those of sorts");
  }
  measure(result, static_cast<double>(event.count) * (size.length + size.budget) * 4,
          [&] { launch_adaptive_heads(a, stream()); });
}

void mass_segmented(Result& result, Shape shape, Size size) {
  const RandomEvent event(shape, size);
  const auto slots = static_cast<std::size_t>(event.count * event.length);
  const DeviceArray<float> mass(slots), credit(slots);
  MassSegmentedArguments a{allotted(event)};
  a.windows = event.windows->data();
  a.queries = event.queries->data();
  a.heads = shape.kv_heads;
  a.slots_in_all = static_cast<std::int64_t>(slots);
  a.mass = mass.data();
  a.credit = credit.data();
  const DeviceArray<std::byte> workspace(mass_segmented_workspace_bytes(a.options, a.count, a.longest, a.slots_in_all));
  a.workspace = workspace.data();
  copy_inside(mass.data(), event.usage->data(), slots * 4);
  launch_mass_segmented(a, stream());
  event.check_kept(result);
  for (const std::int32_t r : sample_of(a.count)) {
    const std::vector<float> shares =
        mass.download(static_cast<std::size_t>(r * event.length), static_cast<std::size_t>(event.length));
    if (std::abs(std::accumulate(shares.begin(), shares.end(), 0.0) - 1) > 1e-3)
      return result.fail("the mass of a row does not sum to 1");
  }
  measure(result, static_cast<double>(event.count) * (4.0 * size.length + size.budget) * 4,
          [&] { launch_mass_segmented(a, stream()); });
}

void chunks(Result& result, Shape shape, Size size) {
  const RandomEvent event(shape, size);
  ChunksArguments a{allotted(event)};
  a.heads = shape.kv_heads;
  a.slots_in_all = event.count * event.length;
  const DeviceArray<std::byte> workspace(static_cast<std::size_t>(chunks_workspace_bytes(a)));
  a.workspace = workspace.data();
  launch_chunks(a, stream());
  event.check_kept(result);
  measure(result, static_cast<double>(event.count) * (size.length + size.budget) * 4,
          [&] { launch_chunks(a, stream()); });
}

/// CriticalKV, all layers with the same output weights. It is bound by its products: `flop` says how many.
void critical(Result& result, Shape shape, Size size) {
  const RandomEvent event(shape, size);
  fill_with_noise(event.cache.data(), event.cache.size() / 2);
  const std::int64_t hidden = std::int64_t{shape.query_heads()} * shape.dim;
  const DeviceArray<std::byte> weights(static_cast<std::size_t>(hidden * hidden * 2));
  fill_with_noise(weights.data(), static_cast<std::size_t>(hidden * hidden));
  const DeviceArray<const void*> projections(
      std::vector<const void*>(static_cast<std::size_t>(shape.layers), weights.data()));
  CriticalArguments a;
  a.evidence.rows = event.rows->data();
  a.evidence.limits = event.limits->data();
  a.evidence.count = static_cast<std::int32_t>(event.count);
  a.evidence.longest = size.length;
  a.evidence.kv_heads = shape.kv_heads;
  a.evidence.group = shape.group;
  a.value_dim = shape.dim;
  a.values = a.projection = Element::bf16;
  a.projections = projections.data();
  a.hidden = static_cast<std::int32_t>(hidden);
  a.slots_in_all = event.count * event.length;
  a.scores = event.usage->data();
  a.indptr = event.bounds->data();
  a.slots = event.slots->data();
  const DeviceArray<std::byte> workspace(static_cast<std::size_t>(critical_workspace_bytes(a)));
  a.workspace = workspace.data();
  launch_critical(a, stream());
  event.check_kept(result);
  result.set("flop", 2.0 * static_cast<double>(a.slots_in_all) * shape.group * shape.dim * static_cast<double>(hidden));
  measure(result, static_cast<double>(a.slots_in_all) * shape.dim * 2, [&] { launch_critical(a, stream()); });
}

/// One new token of every sequence goes to the ring of one layer: what every step pays once per layer.
void push_queries(Result& result, Shape shape, Size size) {
  const std::int64_t head = shape.dim * 2, token = head * shape.query_heads();
  constexpr std::int32_t kRing = 64, kAt = 17;
  std::vector<std::byte> drawn(static_cast<std::size_t>(size.batch * token));
  for (std::size_t i = 0; i < drawn.size(); ++i) drawn[i] = static_cast<std::byte>(i % 251);
  const DeviceArray<std::byte> from(drawn), rings(static_cast<std::size_t>(size.batch * kRing * token));
  const DeviceArray<std::int32_t> positions(static_cast<std::size_t>(size.batch * kRing));
  PushQueriesArguments a;
  a.layout = {.from = from.data(),
              .heads = shape.query_heads(),
              .head_bytes = head,
              .token_stride = token,
              .head_stride = head};
  a.count = std::min(size.batch, kQueryArrivals);
  for (std::int32_t s = 0; s < a.count; ++s)
    a.arrivals[s] = {.first = s,
                     .ring = rings.data() + s * kRing * token,
                     .positions = positions.data() + s * kRing,
                     .capacity = kRing,
                     .at = kAt,
                     .tokens = 1,
                     .position = size.length};
  launch_push_queries(a, stream());
  for (std::int32_t s = 0; s < a.count; ++s) {
    const std::vector<std::byte> there =
        rings.download(static_cast<std::size_t>((s * kRing + kAt) * token), static_cast<std::size_t>(token));
    if (!std::equal(there.begin(), there.end(), drawn.begin() + s * token))
      return result.fail("a query is not in its place");
    if (positions.download(static_cast<std::size_t>(s * kRing + kAt), 1)[0] != size.length)
      return result.fail("a position is not in its place");
  }
  measure(result, 2.0 * static_cast<double>(a.count * token), [&] { launch_push_queries(a, stream()); });
}

/// The same by a table, as a decode graph repeats it.
void push_step(Result& result, Shape shape, Size size) {
  const std::int64_t head = shape.dim * 2, token = head * shape.query_heads();
  std::vector<std::byte> drawn(static_cast<std::size_t>(size.batch * token));
  for (std::size_t i = 0; i < drawn.size(); ++i) drawn[i] = static_cast<std::byte>(i % 251);
  const DeviceArray<std::byte> from(drawn), to(drawn.size());
  const DeviceArray<std::int32_t> positions(static_cast<std::size_t>(size.batch));
  std::vector<QueryPlace> places;
  for (std::int32_t s = 0; s < size.batch; ++s)
    places.push_back({to.data() + s * token, positions.data() + s, size.length});
  const DeviceArray<QueryPlace> table(places);
  const PushStepArguments a{.places = table.data(),
                            .tokens = size.batch,
                            .layout = {.from = from.data(),
                                       .heads = shape.query_heads(),
                                       .head_bytes = head,
                                       .token_stride = token,
                                       .head_stride = head},
                            .offset = {}};
  launch_push_step(a, stream());
  if (to.download() != drawn) return result.fail("a query is not in its place");
  for (const std::int32_t position : positions.download())
    if (position != size.length) return result.fail("a position is not in its place");
  measure(result, 2.0 * static_cast<double>(size.batch * token), [&] { launch_push_step(a, stream()); });
}

/// Scores of all layers and heads of a sequence become their largest.
void share(Result& result, Shape shape, Size size) {
  const RandomEvent event(shape, size);
  const DeviceArray<float> shared(static_cast<std::size_t>(event.count * event.length));
  const ShareArguments a{
      .rows = event.rows->data(),
      .limits = event.limits->data(),
      .sharing = {.share = Sharing::all, .layers = shape.layers, .sequences = size.batch, .heads = shape.kv_heads},
      .longest = size.length,
      .scores = event.scores->data(),
      .shared = shared.data()};
  launch_share(a, stream());
  for (std::int64_t t = 0; t < event.length; t += event.length / 7 + 1) {
    float most = event.drawn[static_cast<std::size_t>(t)];
    for (std::int64_t m = 1; m < a.sharing.members(); ++m)
      most = std::max(most, event.drawn[static_cast<std::size_t>(a.sharing.row(0, m) * event.length + t)]);
    if (shared.download(static_cast<std::size_t>(t), 1)[0] != most)
      return result.fail("a shared score is not the largest");
  }
  measure(result, 2.0 * 4 * static_cast<double>(event.count * event.length), [&] { launch_share(a, stream()); });
}

/// One new score of every KV head of every sequence goes to its column: what every step pays once per layer if scores
/// are given.
void push_given(Result& result, Shape shape, Size size) {
  const std::int32_t rows = std::min(size.batch * shape.kv_heads, kGivenArrivals);
  std::vector<std::uint16_t> drawn(static_cast<std::size_t>(rows));
  for (std::size_t r = 0; r < drawn.size(); ++r) drawn[r] = static_cast<std::uint16_t>(0x3F80 + r);  // bf16, from 1 on
  const DeviceArray<std::uint16_t> from(drawn);
  const DeviceArray<float> columns(static_cast<std::size_t>(rows) * static_cast<std::size_t>(size.length));
  PushGivenArguments a;
  a.count = rows;
  a.element = Element::bf16;
  a.token_stride = std::int64_t{shape.kv_heads} * 2;
  for (std::int32_t r = 0; r < rows; ++r)
    a.arrivals[r] = {.from = reinterpret_cast<const std::byte*>(from.data() + r),
                     .to = columns.data() + (std::int64_t{r} + 1) * size.length - 1,
                     .tokens = 1};
  launch_push_given(a, stream());
  for (std::int32_t r = 0; r < rows; ++r) {
    const auto bits = static_cast<std::uint32_t>(drawn[static_cast<std::size_t>(r)]) << 16;
    if (columns.download((static_cast<std::size_t>(r) + 1) * static_cast<std::size_t>(size.length) - 1, 1)[0] !=
        std::bit_cast<float>(bits))
      return result.fail("a score is not in its place");
  }
  measure(result, 6.0 * rows, [&] { launch_push_given(a, stream()); });
}

}  // namespace

void add_keeping() {
  add("Compact", compact, {{1, 1536, 1024}, {1, 1024, 512}, {8, 1536, 1024}, {32, 1536, 1024}});
  add("Select", select, {{1, 1536, 1024}, {32, 1536, 1024}, {1, 32768, 2048}});
  add("Threshold", threshold, {{1, 1536, 1024}, {32, 1536, 1024}, {1, 32768, 2048}});
  add("TopMass", top_mass, {{1, 32768, 2048}, {1, 131072, 2048}});
  add("AdaptiveHeads", adaptive_heads, {{1, 1536, 1024}, {32, 1536, 1024}, {1, 32768, 2048}});
  add("MassSegmented", mass_segmented, {{1, 1536, 1024}, {32, 1536, 1024}, {1, 32768, 2048}});
  add("Chunks", chunks, {{1, 1536, 1024}, {32, 1536, 1024}, {1, 32768, 2048}});
  add("Critical", critical, {{1, 1536, 1024}, {1, 32768, 2048}}, {{1, 96, 64}});
  add("PushQueries", push_queries, {{1, 1536, 1024}, {32, 1536, 1024}});
  add("PushStep", push_step, {{1, 1536, 1024}, {32, 1536, 1024}});
  add("Share", share, {{1, 1536, 1024}, {32, 1536, 1024}, {1, 32768, 2048}});
  add("PushGiven", push_given, {{1, 1536, 1024}, {32, 1536, 1024}});
}

}  // namespace kvkeep::cuda
