// SPDX-License-Identifier: Apache-2.0
#include "accelerator.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "arrivals.h"
#include "compact.h"
#include "device_folds.h"
#include "event.h"
#include "kvkeep/cuda.h"
#include "kvkeep/keep/pages.h"
#include "kvkeep/policy/policy.h"
#include "page_counts.h"

namespace kvkeep::cuda {
namespace {

class CudaAccelerator final : public MachineMemory, public Machine {
 public:
  using MachineMemory::device, MachineMemory::is_host;

  CudaAccelerator(Device device, std::shared_ptr<DeviceResources> resources, FoldBounds bounds)
      : MachineMemory(device, false),
        Machine(static_cast<MachineMemory&>(*this)),
        bounds_(bounds),
        pool_(device, std::move(resources)),
        memory_(pool_),
        layer_memory_(pool_),
        event_table_(pool_),
        move_table_(pool_),
        blas_(pool_) {}

  [[nodiscard]] std::vector<std::string> problems(const Ask& ask, const ModelSpec& spec) const override {
    return std::visit([&](const auto& demand) { return problems(demand, spec); }, ask);
  }

  [[nodiscard]] std::vector<std::string> problems(const Demand& demand, const ModelSpec& spec) const {
    std::vector<std::string> found;
    if (kernels_of(demand.scorer) == nullptr)
      found.push_back(text("device: scorer ", demand.scorer.name(), " has no kernel; given ", device().str(),
                           "; allowed only on the CPU"));
    if (kernels_of(demand.allocator) == nullptr)
      found.push_back(text("device: allocator ", demand.allocator.name(), " has no kernel; given ", device().str(),
                           "; allowed only on the CPU"));
    for (const bool value : {false, true}) {
      const std::int32_t dim = value ? spec.value_dim : spec.key_dim;
      if ((value ? demand.needs.values : demand.needs.keys) && dim > kMostDim)
        found.push_back(text(value ? "value_dim: " : "key_dim: ", demand.policy, " reads ", value ? "values" : "keys",
                             " of ", dim, " numbers; allowed up to ", kMostDim, " on ", device().str()));
    }
    for (std::string& one : fold_problems(demand, spec, device())) found.push_back(std::move(one));
    if (demand.memory != nullptr)
      for (std::string& one : memory_problems(*demand.memory, spec, device())) found.push_back(std::move(one));
    return found;
  }

  [[nodiscard]] std::vector<std::string> problems(const LayerDemand& demand, const ModelSpec& spec) const {
    std::vector<std::string> found;
    if (spec.key_dim > kMostDim)
      found.push_back(text("key_dim: ", demand.policy, " reads keys of ", spec.key_dim, " numbers; allowed up to ",
                           kMostDim, " on ", device().str()));
    if (demand.cut != nullptr && kernels_of(*demand.cut) == nullptr)
      found.push_back(text("device: ", demand.cut->name(), " of ", demand.policy, " has no kernel; given ",
                           device().str(), "; allowed only on the CPU"));
    return found;
  }

  [[nodiscard]] std::vector<std::string> problems(const HostDemand& demand, const ModelSpec& spec) const {
    std::vector<std::string> found = span_problems(demand.max_span, demand.memory, spec, device());
    for (std::string& one : memory_problems(*demand.memory, spec, device())) found.push_back(std::move(one));
    return found;
  }

  [[nodiscard]] std::unique_ptr<Event> begin(const Evidence& evidence, const Limits& limits, const Ask& ask) override {
    KVKEEP_REQUIRE_AS(Unsupported, !std::holds_alternative<HostDemand>(ask),
                      "decide: the policy decides on the host; given an event on ", device().str(),
                      "; allowed decide() alone");
    const auto* const layer = std::get_if<LayerDemand>(&ask);
    return layer == nullptr ? begin(evidence, limits, std::get<Demand>(ask)) : begin(evidence, limits, *layer);
  }

  [[nodiscard]] std::unique_ptr<Event> begin(const Evidence& evidence, const Limits& limits,
                                             const LayerDemand& demand) {
    const std::vector<std::string> why_not = problems(demand, evidence.spec);
    KVKEEP_REQUIRE_AS(Unsupported, why_not.empty(), "narrow: ", why_not.empty() ? "" : why_not.front());
    KVKEEP_REQUIRE_AS(StateError, capture() != Capture::now,
                      "narrow: the stream is being captured, and the layers of a prompt wait for the device; allowed "
                      "outside a capture");
    ++serial_;
    layer_memory_.begin();
    auto event =
        std::make_unique<CudaEvent>(evidence, limits, pool_, layer_memory_, staging_, constants_, blas_, false);
    event->allocator = demand.cut;
    event->sums = demand.sums();
    const std::vector<std::int32_t> most = demand.cut == nullptr
                                               ? std::vector<std::int32_t>()
                                               : kernels_of(*demand.cut)->most(*demand.cut, evidence, limits);
    if (!most.empty()) event->counts = event->take<std::int32_t>(std::ssize(most));
    measure(*event, {.keys = true}, most.empty() ? most_kept(evidence.table, limits) : most);
    upload(*event, true);
    return event;
  }

  [[nodiscard]] std::unique_ptr<FoldedMemory> folded_memory(const ModelSpec& spec,
                                                            const MemoryOptions& memory) override {
    return std::make_unique<DeviceFolds>(
        spec, memory, bounds_, pool_, *this, staging_,
        [this](const RowTable& table, const Decision& decision) { return slots_of(table, decision); });
  }

  [[nodiscard]] std::unique_ptr<Event> begin(const Evidence& evidence, const Limits& limits, const Demand& demand) {
    const std::vector<std::string> why_not = problems(demand, evidence.spec);
    KVKEEP_REQUIRE_AS(Unsupported, why_not.empty(), "decide: ", why_not.empty() ? "" : why_not.front());
    const std::vector<std::int32_t> most = kernels_of(demand.allocator)->most(demand.allocator, evidence, limits);
    KVKEEP_REQUIRE_AS(StateError, dry_ || most.empty() || capture() != Capture::now, "decide: under ", demand.policy,
                      " the scores decide how many slots stay, which a replay could not tell the host; allowed events "
                      "that are not captured");
    if (!dry_) {
      ++serial_;  // this invalidates earlier decisions
      memory_.begin();
    }
    auto event = std::make_unique<CudaEvent>(evidence, limits, pool_, memory_, staging_, constants_, blas_, dry_);
    event->allocator = &demand.allocator;
    event->folds = demand.rest.has_value();
    if (!most.empty()) event->counts = event->take<std::int32_t>(std::ssize(most));
    measure(*event, demand.needs, most.empty() ? most_kept(evidence.table, limits) : most);
    if (!dry_) upload(*event);
    return event;
  }

  std::int64_t workspace(const KVPolicy& policy, const Evidence& evidence, bool take) override {
    if (take && memory_.given() < 0 && memory_.has_served(evidence.table)) return 0;
    memory_.begin_counting();
    dry_ = true;
    try {
      static_cast<void>(policy.decide(*this, evidence));
    } catch (...) {
      dry_ = false;
      throw;
    }
    dry_ = false;
    const std::int64_t needed = memory_.counted();
    if (!take) return needed;
    if (memory_.given() >= 0) {
      KVKEEP_REQUIRE_AS(StateError, needed <= memory_.given(), "decide: the workspace holds ", memory_.given(),
                        " bytes, but this event needs ", needed, "; allowed at least that, or no workspace");
    } else {
      memory_.reserve(needed, evidence.table);
      ++serial_;  // what earlier decisions hold may be gone
    }
    return needed;
  }

  void move(const RowTable& table, const Decision& decision, std::span<const PageMove> pages,
            std::span<const ColumnTarget> columns) override {
    const DeviceScope scope(device().index);
    const EventSlots slots = slots_of(table, decision);
    const Stream stream = pool_.stream();
    std::vector<ColumnMove> moves(columns.size());
    for (std::size_t r = 0; r < columns.size(); ++r) {
      const std::int64_t first = table.rows[r].first;
      moves[r].positions = columns[r].positions;
      moves[r].credit = columns[r].credit;
      moves[r].new_credit = decision.credit ? decision.credit->data<float>() + first : nullptr;
      moves[r].tally = columns[r].tally;
      moves[r].new_tally = decision.tally ? decision.tally->data<float>() + first : nullptr;
      moves[r].given = columns[r].given;
    }
    std::int64_t stride = 0;
    std::int32_t sequences = 0;
    for (const PageMove& page : pages) {
      stride = std::max(stride, static_cast<std::int64_t>(page.after.size()));
      sequences = std::max(sequences, page.sequence + 1);
    }
    std::vector<std::int32_t> after(static_cast<std::size_t>(sequences * stride), -1);
    for (const PageMove& page : pages)
      std::copy(page.after.begin(), page.after.end(), after.begin() + page.sequence * stride);
    move_table_.clear();
    const std::int64_t moves_at = move_table_.add(moves), after_at = move_table_.add(after);
    move_table_.place();
    move_table_.upload(staging_, stream);
    // Before the rows move: the host need not wait for that.
    if (slots.tables.counts != nullptr)
      counts_.begin(slots.tables.counts, table.rows.size() * sizeof(std::int32_t), stream);
    launch_compact({.rows = slots.tables.rows,
                    .columns = move_table_.there<ColumnMove>(moves_at),
                    .count = static_cast<std::int32_t>(table.rows.size()),
                    .slots = slots.kept,
                    .indptr = slots.tables.indptr,
                    .counts = slots.tables.counts,
                    .pages_after = pages.empty() ? nullptr : move_table_.there<std::int32_t>(after_at),
                    .pages_stride = stride},
                   stream);
  }

  void read_counts(std::span<std::int32_t> counts) override {
    const DeviceScope scope(device().index);
    counts_.finish(counts.data(), counts.size_bytes());
  }

  void use_workspace(Tensor memory) override {
    memory_.use(std::move(memory));
    ++serial_;
  }

 private:
  [[nodiscard]] DeviceMemory allocate(std::int64_t bytes) override { return pool_.allocate(bytes); }

  [[nodiscard]] Capture capture() const override {
    if (is_capturing(pool_.current())) return Capture::now;
    return pool_.captured() ? Capture::before : Capture::never;
  }

  void write(void* to, const void* from, std::int64_t bytes) override {
    constexpr std::int64_t kPiece = std::int64_t{4} << 20;  // no more page-locked memory than that stays
    const DeviceScope scope(device().index);
    for (std::int64_t at = 0; at < bytes; at += kPiece)
      staging_.upload(static_cast<std::byte*>(to) + at, static_cast<const std::byte*>(from) + at,
                      static_cast<std::size_t>(std::min(kPiece, bytes - at)), pool_.stream());
  }

  void copy_rows(void* to, std::int64_t to_stride, const void* from, std::int64_t from_stride, std::int64_t bytes,
                 std::int64_t rows) override {
    const DeviceScope scope(device().index);
    cuda::copy_rows(to, to_stride, from, from_stride, bytes, rows, pool_.stream());
  }

  void push_queries(const QueryTargets& to, const QueryLayout& layout) override {
    if (const auto* const table = std::get_if<QueryTable>(&to)) {
      const DeviceScope scope(device().index);
      launch_push_step({.places = table->places, .tokens = table->tokens, .layout = layout, .offset = table->offset},
                       pool_.stream());
      return;
    }
    PushQueriesArguments arguments;
    arguments.layout = layout;
    push(launch_push_queries, arguments, std::get<std::span<const QueryArrival>>(to));
  }

  void push_given(std::span<const GivenArrival> arrivals, const GivenLayout& layout) override {
    PushGivenArguments arguments;
    arguments.element = element_of("scores", layout.dtype);
    arguments.token_stride = layout.token_stride;
    push(launch_push_given, arguments, arrivals);
  }

  /// Launches as often as the arrivals do not fit the arguments of one launch.
  template <class Arguments, class Arrival>
  void push(void (*launcher)(const Arguments&, Stream), Arguments& arguments, std::span<const Arrival> arrivals) {
    const DeviceScope scope(device().index);
    while (!arrivals.empty()) {
      const std::size_t count = std::min(std::size(arguments.arrivals), arrivals.size());
      arguments.count = static_cast<std::int32_t>(count);
      std::copy_n(arrivals.begin(), count, arguments.arrivals);
      launcher(arguments, pool_.stream());
      arrivals = arrivals.subspan(count);
    }
  }

  void read(void* to, const void* from, std::int64_t bytes) override {
    const DeviceScope scope(device().index);
    download(to, from, static_cast<std::size_t>(bytes), pool_.stream());
  }

  /// Of the newest decision, or of one that the host made, whose rows and slots are sent, and its positions settled.
  [[nodiscard]] EventSlots slots_of(const RowTable& table, const Decision& decision) {
    const KeepSet& keep = *decision.keep;
    if (decision.tables.rows == nullptr) return send(table, keep);
    KVKEEP_REQUIRE_AS(StateError, decision.tables.serial == serial_,
                      "apply: the slots of this plan were in memory that a later plan, or use_workspace(), has reused; "
                      "allowed the newest plan on ",
                      device().str());
    return {decision.tables, keep.slots.data<std::int32_t>()};
  }

  [[nodiscard]] EventSlots send(const RowTable& given, const KeepSet& keep) {
    KVKEEP_REQUIRE_AS(StateError, capture() != Capture::now,
                      "apply: the stream is being captured, and what the host decides differs from event to event; "
                      "allowed outside a capture");
    RowTable table = given;
    ModelSpec spec;  // as much of it as rows without queries need
    spec.kv_heads = spec.query_heads = static_cast<std::int32_t>(table.rows.size() / table.groups.size());
    spec.key_dim = spec.value_dim = 1;
    for (RowGroup& group : table.groups) {
      group.queries = {}, group.pinned = {};
      spec.layers.resize(std::max(spec.layers.size(), static_cast<std::size_t>(group.layer) + 1));
    }
    Limits limits;
    limits.rows.resize(table.rows.size());
    const Evidence evidence{.spec = spec, .table = table};
    ++serial_;
    CudaEvent event(evidence, limits, pool_, memory_, staging_, constants_, blas_, false);
    std::vector<std::int32_t> counts;
    for (std::size_t r = 0; r < table.rows.size(); ++r) counts.push_back(static_cast<std::int32_t>(keep.count(r)));
    measure(event, {}, counts);
    upload(event, false, keep.slots);
    event.settle_positions();
    return {event.tables, event.keep.slots.data<std::int32_t>()};
  }

  /// What follows from shapes alone: how much kernels read, where the kept slots of every row will be (`most`, of
  /// each), and memory for what kernels find. Cheap enough for an event whose memory is only counted.
  void measure(CudaEvent& event, const Needs& needs, std::span<const std::int32_t> most) {
    const RowTable& table = event.evidence.table;
    const ModelSpec& spec = event.evidence.spec;
    KeepSet& keep = event.keep;
    keep.indptr.push_back(0);
    std::int32_t longest = 0;
    for (std::size_t r = 0; r < table.rows.size(); ++r) {
      const Row& row = table.rows[r];
      const RowLimit& limit = event.limits.rows[r];
      keep.indptr.push_back(keep.indptr.back() + most[r]);
      keep.in_place.push_back(limit.due ? std::min(limit.guarded.sinks, row.length) : row.length);
      longest = std::max(longest, row.length);
    }
    Dtype query_dtype = Dtype::f32;
    std::int64_t pinned = 0;
    for (const RowGroup& group : table.groups) {
      if (group.queries.data != nullptr) query_dtype = group.queries.dtype;
      pinned += std::ssize(group.pinned);
    }
    event.arguments = {.count = static_cast<std::int32_t>(table.rows.size()),
                       .longest = longest,
                       .kv_heads = spec.kv_heads,
                       .first_head = spec.first_head,
                       .group = spec.query_heads == 0 ? 1 : spec.group(),
                       .dim = spec.key_dim,
                       .keys = needs.keys ? element_of_keys(table) : Element::f32,
                       .query = element_of("queries", query_dtype),
                       .scale = static_cast<float>(spec.scale()),
                       .logit_cap = static_cast<float>(spec.logit_cap)};
    event.value_element = needs.values ? element_of_values(table) : Element::f32;
    if (pinned > 0) {
      event.pinned_ranges = event.take<SlotRange>(pinned * spec.kv_heads);
      event.settled_limits = event.take<RowLimit>(std::ssize(table.rows));
    }
  }

  /// Sends everything of the event that kernels read in one copy. `layer`: the positions of queries are on the host.
  /// kept: slots that the host has chosen, or none.
  void upload(CudaEvent& event, bool layer = false, const Tensor& kept = {}) {
    const RowTable& table = event.evidence.table;
    const ModelSpec& spec = event.evidence.spec;
    std::vector<QueryView> queries;
    std::vector<std::int32_t> next;
    std::vector<NewestPositions> newest;
    std::vector<PositionRun> runs;
    std::map<std::int32_t, std::pair<std::size_t, std::size_t>> runs_of;  // by sequence: the same in every layer
    std::vector<PositionSpan> spans;
    std::vector<PinnedSpans> pins;
    std::vector<RopeView> ropes;
    bool turns = false;
    for (const RowGroup& group : table.groups) {
      const RopeSpec& rope = spec.rope_of(group.layer);
      turns = turns || !rope.inv_freq.empty();
      ropes.push_back(rope.view(rope.inv_freq.empty() ? nullptr : event.constant(rope.inv_freq)));
      queries.push_back(group.queries);
      next.push_back(group.next_position);
      auto [at, fresh] = runs_of.try_emplace(group.sequence, runs.size(), 0);
      if (fresh) {
        for (const std::int32_t position : group.newest) {
          if (runs.size() > at->second.first && runs.back().position + runs.back().count == position)
            ++runs.back().count;
          else
            runs.push_back({position, 1});
        }
        at->second.second = runs.size() - at->second.first;
      }
      newest.push_back({.runs = nullptr,
                        .count = static_cast<std::int32_t>(at->second.second),
                        .slots = static_cast<std::int32_t>(group.newest.size())});
      pins.push_back({.count = static_cast<std::int32_t>(group.pinned.size())});
      spans.insert(spans.end(), group.pinned.begin(), group.pinned.end());
    }

    event_table_.clear();
    std::map<const std::int32_t*, std::int64_t> pages;  // by their address on the host
    const std::vector<std::int64_t> page_counts = pages_of_sequences(table);
    for (const RowGroup& group : table.groups) {
      const Row& row = table.rows[static_cast<std::size_t>(group.first_row)];
      if (row.keys.pages != nullptr && !pages.contains(row.keys.pages))
        pages[row.keys.pages] = event_table_.add(
            row.keys.pages, static_cast<std::size_t>(page_counts[static_cast<std::size_t>(row.sequence)]));
    }
    const std::int64_t rows_at = event_table_.add(table.rows), limits_at = event_table_.add(event.limits.rows),
                       queries_at = event_table_.add(queries), next_at = event_table_.add(next),
                       runs_at = event_table_.add(runs), newest_at = event_table_.add(newest),
                       ropes_at = turns ? event_table_.add(ropes) : 0, indptr_at = event_table_.add(event.keep.indptr),
                       spans_at = event_table_.add(spans), pins_at = spans.empty() ? 0 : event_table_.add(pins);
    const std::int64_t kept_at =
        kept.defined() ? event_table_.add(kept.data<std::int32_t>(), static_cast<std::size_t>(kept.numel())) : 0;
    std::vector<std::int64_t> positions_at;
    if (layer)
      for (const QueryView& q : queries)
        positions_at.push_back(event_table_.add(q.positions, static_cast<std::size_t>(q.ring)));
    event_table_.place();
    for (std::size_t g = 0; g < positions_at.size(); ++g)
      event_table_.here<QueryView>(queries_at)[g].positions = event_table_.there<std::int32_t>(positions_at[g]);
    std::int64_t first_span = 0;
    for (std::size_t g = 0; g < pins.size() && !spans.empty(); first_span += pins[g++].count) {
      PinnedSpans& there = event_table_.here<PinnedSpans>(pins_at)[g];
      there.spans =
          event_table_.there<PositionSpan>(spans_at + first_span * static_cast<std::int64_t>(sizeof(PositionSpan)));
      there.ranges = event.pinned_ranges + first_span * spec.kv_heads;
    }
    for (std::size_t r = 0; r < table.rows.size(); ++r) {
      Row& row = event_table_.here<Row>(rows_at)[r];
      for (SlotAddress* side : {&row.keys, &row.values, &row.key_scales, &row.value_scales, &row.extra})
        if (side->pages != nullptr) side->pages = event_table_.there<std::int32_t>(pages.at(side->pages));
    }
    for (std::size_t g = 0; g < newest.size(); ++g) {
      const std::size_t first = runs_of.at(table.groups[g].sequence).first;
      event_table_.here<NewestPositions>(newest_at)[g].runs =
          event_table_.there<PositionRun>(runs_at + static_cast<std::int64_t>(first * sizeof(PositionRun)));
    }
    event_table_.upload(staging_, pool_.stream());
    if (kept.defined())
      event.keep.slots = Tensor(event_table_.there<std::int32_t>(kept_at), Dtype::i32, kept.sizes(), device());

    event.arguments.rows = event_table_.there<Row>(rows_at);
    event.arguments.limits = event_table_.there<RowLimit>(limits_at);
    event.arguments.queries = event_table_.there<QueryView>(queries_at);
    event.tables = {.rows = event.arguments.rows,
                    .indptr = event_table_.there<std::int64_t>(indptr_at),
                    .serial = serial_,
                    .counts = event.counts};
    if (!spans.empty()) {
      event.pins = event_table_.there<PinnedSpans>(pins_at);
      event.given_limits = event.arguments.limits;
      event.arguments.limits = event.settled_limits;
    }
    event.next_positions = event_table_.there<std::int32_t>(next_at);
    event.newest_positions = event_table_.there<NewestPositions>(newest_at);
    if (turns) event.arguments.ropes = event_table_.there<RopeView>(ropes_at);
    if (std::ranges::any_of(spec.layers, [](const LayerSpec& of) { return !of.sinks.empty(); })) {
      std::vector<float> all;
      for (const LayerSpec& of : spec.layers) {
        all.insert(all.end(), of.sinks.begin(), of.sinks.end());
        all.resize(all.size() + static_cast<std::size_t>(spec.query_heads) - of.sinks.size(),
                   -std::numeric_limits<float>::infinity());
      }
      event.arguments.sinks = event.constant(all);
    }
  }

  FoldBounds bounds_;
  DevicePool pool_;
  EventMemory memory_, layer_memory_;  ///< of events; of the layers of prompts, which use_workspace() does not serve
  Staging staging_;
  Readback counts_;
  DeviceTable event_table_, move_table_;
  std::uint64_t serial_ = 0;  ///< of the newest event, the only one that workspace and tables hold
  bool dry_ = false;          ///< events launch nothing, and only count memory
  Constants constants_;
  EventBlas blas_;
};

}  // namespace

std::shared_ptr<Machine> make_accelerator(Device device, std::shared_ptr<DeviceResources> resources,
                                          FoldBounds bounds) {
  return std::make_shared<CudaAccelerator>(device, std::move(resources), bounds);
}

std::shared_ptr<DeviceResources> default_resources(int index) {
  require_device(index);
  const MakeDeviceResources make = detail::device_resources.load(std::memory_order_acquire);
  return make == nullptr ? pool_resources(index) : make(gpu(index));
}

std::shared_ptr<Machine> accelerator(int index, std::shared_ptr<DeviceResources> resources) {
  if (resources == nullptr)
    resources = default_resources(index);
  else
    require_device(index);
  return make_accelerator(gpu(index), std::move(resources));
}

}  // namespace kvkeep::cuda
