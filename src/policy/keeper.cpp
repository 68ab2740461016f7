#include "kvkeep/policy/keeper.h"

#include <algorithm>
#include <numeric>
#include <type_traits>
#include <utility>
#include <variant>

#include "check_sequences.h"
#include "kvkeep/core/page_allocator.h"
#include "device_columns.h"
#include "kvkeep/keep/compact.h"

namespace kvkeep {
namespace {

/// K and V bytes of one slot of one head, scales included.
std::int64_t slot_bytes(const ModelSpec& spec, const LayerKv& layer) {
  const auto of = [&spec](const auto& kv) -> std::int64_t {
    if constexpr (std::is_same_v<std::decay_t<decltype(kv)>, std::monostate>) {
      return 0;
    } else {
      const auto scale = [](const Tensor& t) { return t.defined() ? static_cast<std::int64_t>(t.element_size()) : 0; };
      return spec.key_dim * static_cast<std::int64_t>(kv.keys.element_size()) + spec.value_dim * static_cast<std::int64_t>(kv.values.element_size()) +
             scale(kv.key_scales) + scale(kv.value_scales);
    }
  };
  return std::visit(of, layer);
}

/// K and V bytes of the live slots of all full layers.
std::int64_t live_bytes(const ModelSpec& spec, std::span<const std::int32_t> full_layers, const CacheView& view) {
  std::int64_t bytes = 0;
  for (const std::int32_t l : full_layers)
    for (std::size_t i = 0; i < view.sequences.size(); ++i)
      for (std::int32_t h = 0; h < spec.kv_heads; ++h)
        bytes += slot_bytes(spec, view.layers[static_cast<std::size_t>(l)]) * view.lengths.at(i, l * spec.kv_heads + h);
  return bytes;
}

/// Rows of one sequence may end up unequal only where the view can say so.
void require_one_length(const RowTable& table, const KeepSet& keep, const CacheView& view) {
  if (view.lengths.per_row()) return;
  std::vector<std::int64_t> lengths(view.sequences.size(), -1);
  for (std::size_t r = 0; r < table.rows.size(); ++r) {
    std::int64_t& length = lengths[static_cast<std::size_t>(table.rows[r].sequence)];
    require(length < 0 || length == keep.count(r), "apply: rows of sequence ", view.sequences[static_cast<std::size_t>(table.rows[r].sequence)], " keep ", length, " and ",
            keep.count(r), " slots; the view has one length a sequence, allowed with one length a row");
    length = keep.count(r);
  }
}

/// After an event that did not come about.
void give_back_taken(std::span<const PageMove> planned, std::span<const PageMove> taken, PageAllocator* pages) {
  for (std::size_t i = 0; i < planned.size(); ++i)
    for (std::size_t p = 0; p < planned[i].after.size(); ++p)
      if (planned[i].after[p] == PageMove::kTake) pages->give_back(taken[i].after[p]);
}

/// Writes the block table, then hands back what is no longer held; returns how many pages that are.
std::int64_t settle_pages(std::span<const PageMove> moves, const CacheView& view) {
  std::int64_t freed = 0;
  for (const PageMove& move : moves) {
    std::int32_t* row = view.block_table.data_ptr<std::int32_t>() + move.sequence * view.block_table.stride(0);
    std::copy(move.after.begin(), move.after.end(), row);
    std::fill(row + move.after.size(), row + move.before.size(), -1);
    freed += static_cast<std::int64_t>(move.freed.size());
    if (view.pages != nullptr)
      for (const std::int32_t page : move.freed) view.pages->give_back(page);
  }
  return freed;
}

}  // namespace

std::vector<std::string> problems(const KVPolicy& policy, const ModelSpec& spec, const Provided& provided) {
  std::vector<std::string> found = policy.problems(spec);
  const Needs needs = policy.needs();
  if (provided.accelerator != nullptr) {
    for (std::string& one : provided.accelerator->problems(policy, spec)) found.push_back(std::move(one));
    if (policy.narrows()) found.push_back(text("device: ", policy.name(), " narrows prompts, which a keeper does on the CPU only; given ", provided.accelerator->device().str()));
    if (needs.statistics_from >= 0) found.push_back(text("device: ", policy.name(), " reads statistics of every query, which are kept on the CPU only; given ", provided.accelerator->device().str()));
  }
  if (policy.memory() != nullptr) {
    if (provided.accelerator != nullptr) found.push_back(text("device: ", policy.name(), " folds spans, which a keeper does on the CPU only; given ", provided.accelerator->device().str()));
    if (!provided.reads_folded) found.push_back(text("reads_folded: ", policy.name(), " folds spans; the engine does not say that it calls view() behind each layer's attention"));
  }
  if (needs.surprisal && !provided.surprisal) found.push_back(text("surprisal: ", policy.name(), " reads that of every token; the engine gives none"));
  if (needs.queries > 0 && !provided.queries)
    found.push_back(text("queries: ", policy.name(), " reads the newest ", needs.queries, " of every full layer; the engine gives none"));
  if (policy.narrows() && !provided.layer_by_layer)
    found.push_back(text("layer_by_layer: ", policy.name(), " narrows prompts while they run; the engine does not say that it runs them layer by layer and calls narrow() behind each"));
  if (policy.narrows() && (!provided.queries || spec.query_heads == 0))
    found.push_back(text("queries: ", policy.name(), " reads those of prompts; ", provided.queries ? "the model spec does not say how many heads they have" : "the engine gives none"));
  if (needs.queries > 0 && spec.query_heads == 0) found.push_back(text("query_heads: ", policy.name(), " reads queries; the model spec does not say how many heads they have"));
  if (!needs.output_projection) return found;
  const auto& given = provided.output_projections;
  if (given.empty()) {
    found.push_back(text("output_projections: ", policy.name(), " weighs values by W_o; the engine gives none"));
  } else if (given.size() != spec.layers.size()) {
    found.push_back(text("output_projections: there are ", given.size(), "; allowed one for each of ", spec.layers.size(), " layers"));
  } else {
    const std::int64_t width = std::int64_t{spec.query_heads} * spec.value_dim;
    for (const std::int32_t l : spec.full_layers()) {
      const Tensor& w = given[static_cast<std::size_t>(l)];
      const Device there = provided.accelerator == nullptr ? Device(c10::kCPU) : provided.accelerator->device();
      if (w.defined() && w.device() != there) found.push_back(text("output_projections: that of layer ", l, " is on ", w.device().str(), "; allowed on ", there.str(), ", where the keeper works"));
      if (!w.defined() || w.dim() != 2 || w.size(1) != width || !w.is_contiguous() || !is_scorable(w.scalar_type()))
        found.push_back(text("output_projections: that of layer ", l, w.defined() ? " does not fit" : " is missing", "; allowed a contiguous f32, f16 or bf16 [hidden, ", width, "]"));
    }
  }
  return found;
}

void check(const KVPolicy& policy, const ModelSpec& spec, const Provided& provided) {
  const std::vector<std::string> found = problems(policy, spec, provided);
  if (found.empty()) return;
  std::string all = text("policy ", policy.name(), " cannot run here:");
  if (found.size() == 1) refuse(all, " ", found.front());
  for (const std::string& one : found) all += "\n  " + one;
  refuse(all);
}

Keeper::Keeper(ModelSpec spec, std::unique_ptr<KVPolicy> policy, Provided provided) : spec_(std::move(spec)), policy_(std::move(policy)), provided_(std::move(provided)) {
  spec_.check();
  require(policy_ != nullptr, "Keeper: there is no policy; allowed one from make_policy()");
  kvkeep::check(*policy_, spec_, provided_);
  needs_ = policy_->needs();
  full_layers_ = spec_.full_layers();
  require(!full_layers_.empty(), "Keeper: the model has no full-attention layer, so there is nothing to keep or drop; allowed one or more");
  layer_index_.assign(spec_.layers.size(), -1);
  for (std::size_t i = 0; i < full_layers_.size(); ++i) layer_index_[static_cast<std::size_t>(full_layers_[i])] = static_cast<std::int32_t>(i);
  if (const MemoryOptions* memory = policy_->memory()) {
    far_ = provided_.far_store != nullptr ? provided_.far_store : FarStore::make(memory->far);
    near_ = std::make_unique<FactorCache>(memory->near);
  }
}

void Keeper::join(SequenceId sequence, std::int32_t tokens, std::int32_t prompt) {
  require<StateError>(!knows(sequence), "join: sequence ", sequence, " is already here; allowed after leave(), or use reset()");
  require(tokens >= 0, "join: sequence ", sequence, " begins with ", tokens, " cached tokens; allowed 0 or more");
  require(prompt == -1 || prompt >= tokens, "join: sequence ", sequence, " has a prompt of ", prompt, " tokens and ", tokens,
          " of them cached; allowed at least as many as are cached, or -1 for not known");
  const auto layers = static_cast<std::int32_t>(full_layers_.size());
  Accelerator* accelerator = provided_.accelerator.get();
  std::unique_ptr<Columns> columns;
  if (accelerator == nullptr) columns = std::make_unique<HostColumns>(layers * spec_.kv_heads);
  else columns = std::make_unique<DeviceColumns>(layers * spec_.kv_heads, *accelerator);
  Sequence fresh{std::move(columns), QueryRing(layers, needs_.queries, spec_.query_heads, spec_.key_dim, accelerator), {}};
  if (needs_.statistics_from >= 0) fresh.statistics.assign(full_layers_.size(), QueryStatistics(spec_.query_heads, spec_.key_dim, needs_.statistics_from));
  std::vector<std::int32_t> positions(static_cast<std::size_t>(tokens));
  std::iota(positions.begin(), positions.end(), 0);
  fresh.columns->append(positions);
  fresh.prefix = fresh.next_position = tokens;
  fresh.logical = fresh.asked = tokens;
  fresh.prompt = prompt == -1 && tokens > 0 ? tokens : prompt;
  if (const MemoryOptions* memory = policy_->memory()) {
    const auto rows = static_cast<std::size_t>(layers * spec_.kv_heads);
    fresh.memory.assign(rows, SpanRow(spec_.key_dim, memory->factors.store));
    fresh.opened.resize(rows);
    fresh.viewed.resize(full_layers_.size());
  }
  sequences_.emplace(sequence, std::move(fresh));
}

void Keeper::leave(SequenceId sequence) {
  for (const SpanRow& row : at(sequence).memory) near_->forget(row.blobs());
  sequences_.erase(sequence);
  ++version_;
}

void Keeper::reset(SequenceId sequence) {
  leave(sequence);
  join(sequence);
}

void Keeper::check(const Observation& o) const {
  check_sequences("observe", o);
  const std::int32_t tokens = o.indptr.back();
  require(o.positions.empty() || static_cast<std::int32_t>(o.positions.size()) == tokens, "observe: ", o.positions.size(), " positions for ", tokens, " tokens; allowed none or one each");
  for (std::size_t i = 0; i < o.sequences.size(); ++i) {
    const Sequence& s = at(o.sequences[i]);
    const std::int32_t own_tokens = o.indptr[i + 1] - o.indptr[i];
    require(!begins_prompt(s, own_tokens) || s.prompt <= own_tokens, "observe: sequence ", o.sequences[i], " brings ", own_tokens, " of the ", s.prompt, " tokens of its prompt; ", policy_->name(),
            " compares layers over the whole prompt, allowed all of it in one step");
    const bool first = leads(s, o.layer, own_tokens);
    require<StateError>(!first || s.pass == nullptr, "observe: layer ", o.layer, " brings more tokens of sequence ", o.sequences[i], ", whose prompt has come to layer ", s.next_layer, "; allowed when it has ended");
    if (!first) {
      require<StateError>(s.pass == nullptr || own_tokens == static_cast<std::int32_t>(s.present.size()), "observe: layer ", o.layer, " gives ", own_tokens, " tokens of sequence ", o.sequences[i], "; ",
                          s.present.size(), " went on to it, allowed these");
      const auto shown = already_shown(s, o.layer, own_tokens);
      require(o.positions.empty() || std::equal(shown.begin(), shown.end(), o.positions.begin() + o.indptr[i]), "observe: layer ", o.layer, " gives sequence ",
              o.sequences[i], " other positions than an earlier layer of the step; allowed the same in every layer");
      continue;
    }
    std::int64_t least = s.next_position;
    for (std::int32_t t = o.indptr[i]; !o.positions.empty() && t < o.indptr[i + 1]; ++t) {
      const std::int32_t p = o.positions[static_cast<std::size_t>(t)];
      require(p >= least, "observe: token ", t - o.indptr[i], " of sequence ", o.sequences[i], " stands at position ", p, "; allowed ", least, " or more (positions are logical and ascend)");
      least = std::int64_t{p} + 1;
    }
  }
  if (needs_.queries == 0) return;
  check_queries("observe", o);
  for (const SequenceId id : o.sequences)
    require(at(id).ring.takes(o.queries.scalar_type()), "observe: queries of layer ", o.layer, ", sequence ", id, ", are ", c10::toString(o.queries.scalar_type()), "; earlier ones were ",
            c10::toString(at(id).ring.dtype()), ", allowed one dtype");
  require(!basis_known_ || o.basis == basis_, "observe: queries of layer ", o.layer, " come ", o.basis == QueryBasis::pre_rope ? "before" : "after",
          " RoPE; earlier ones came the other way, allowed one basis");
}

void Keeper::check_queries(const char* operation, const Observation& o) const {
  const Tensor& q = o.queries;
  const std::int32_t tokens = o.indptr.back();
  require(q.defined(), operation, ": layer ", o.layer, " comes without queries; policy ", policy_->name(), " needs ", needs_.queries > 0 ? text("the last ", needs_.queries, " of every full layer") : "those of prompts");
  require(q.dim() == 3 && q.size(0) == tokens && q.size(1) == spec_.query_heads && q.size(2) == spec_.key_dim, operation, ": queries of layer ", o.layer, " have ", q.dim(),
          " dimensions", q.dim() == 3 ? text(" [", q.size(0), ", ", q.size(1), ", ", q.size(2), "]") : "", "; allowed [", tokens, ", ", spec_.query_heads, ", ",
          spec_.key_dim, "]");
  require(is_scorable(q.scalar_type()), operation, ": queries of layer ", o.layer, " are ", c10::toString(q.scalar_type()), "; allowed f32, f16, bf16");
  require(q.stride(2) == 1 || spec_.key_dim == 1, operation, ": queries of layer ", o.layer, " have stride ", q.stride(2), " in the last dimension; allowed 1");
  require(q.device() == device(), operation, ": queries of layer ", o.layer, " are on ", q.device().str(), "; the keeper works on ", device().str(), ", allowed there only");
}

/// True when these tokens are the first that any layer shows of this step.
bool Keeper::leads(const Sequence& s, std::int32_t layer, std::int32_t tokens) const {
  const std::int32_t index = layer_index_[static_cast<std::size_t>(layer)];
  return s.prefix + s.ring.seen(index) + tokens > s.logical;
}

/// Positions that an earlier layer gave to the tokens that this one shows now.
std::span<const std::int32_t> Keeper::already_shown(const Sequence& s, std::int32_t layer, std::int32_t tokens) const {
  if (s.pass != nullptr) return s.present;
  const std::int64_t behind = s.logical - s.prefix - s.ring.seen(layer_index_[static_cast<std::size_t>(layer)]);
  const auto newest = s.columns->newest();
  require<StateError>(behind <= static_cast<std::int64_t>(newest.size()), "observe: layer ", layer, " is ", behind, " tokens behind the other layers; observe every full layer in each step");
  return newest.subspan(newest.size() - static_cast<std::size_t>(behind), static_cast<std::size_t>(tokens));
}

void Keeper::observe(const Observation& o) {
  require(o.layer >= 0 && o.layer < spec_.num_layers(), "observe: layer ", o.layer, " is out of range; allowed 0 to ", spec_.num_layers() - 1);
  const std::int32_t index = layer_index_[static_cast<std::size_t>(o.layer)];
  if (index < 0) return;  // sliding, shared and other layers are not ours
  check(o);
  if (o.queries.defined()) {
    basis_ = o.basis;
    basis_known_ = true;
  }
  ++version_;
  std::vector<std::int32_t>& positions = positions_;
  arrivals_.clear();
  QueryLayout layout{};
  for (std::size_t i = 0; i < o.sequences.size(); ++i) {
    Sequence& s = sequences_.at(o.sequences[i]);
    const std::int32_t tokens = o.indptr[i + 1] - o.indptr[i];
    const bool first = leads(s, o.layer, tokens);
    if (o.positions.empty()) {
      positions.resize(static_cast<std::size_t>(tokens));
      if (first) std::iota(positions.begin(), positions.end(), s.next_position);
      else std::ranges::copy(already_shown(s, o.layer, tokens), positions.begin());
    } else {
      positions.assign(o.positions.begin() + o.indptr[i], o.positions.begin() + o.indptr[i + 1]);
    }
    if (first) {
      if (begins_prompt(s, tokens)) begin_prompt(s, positions);
      s.columns->append(positions);
      s.logical += tokens;
      if (tokens > 0) s.next_position = positions.back() + 1;
    }
    const std::byte* data = nullptr;
    std::int64_t token_stride = 0, head_stride = 0;
    ScalarType dtype = kFloat32;
    if (needs_.queries > 0) {
      const auto bytes = static_cast<std::int64_t>(o.queries.element_size());
      dtype = o.queries.scalar_type();
      token_stride = o.queries.stride(0) * bytes;
      head_stride = o.queries.stride(1) * bytes;
      data = static_cast<const std::byte*>(o.queries.const_data_ptr()) + o.indptr[i] * token_stride;
    }
    if (!s.statistics.empty()) s.statistics[static_cast<std::size_t>(index)].add(data, dtype, token_stride, head_stride, positions, o.basis, spec_.rope);
    std::span<const std::int32_t> seen = positions;
    if (s.pass != nullptr && s.tail < s.report->tokens) {  // what went on is whole at its end only
      s.ring.skip(index, s.report->tokens - s.tail);
      if (data != nullptr) data += (tokens - s.tail) * token_stride;
      seen = seen.last(static_cast<std::size_t>(s.tail));
    }
    s.ring.push(index, data, dtype, token_stride, head_stride, seen, &arrivals_);
    layout = {.heads = spec_.query_heads, .head_bytes = static_cast<std::int64_t>(c10::elementSize(dtype)) * spec_.key_dim, .token_stride = token_stride, .head_stride = head_stride};
  }
  if (!arrivals_.empty()) provided_.accelerator->push_queries(arrivals_, layout);
}

RowTable Keeper::table_of(const CacheView& view, std::span<const std::int32_t> due) const {
  RowTable table = make_rows(spec_, view, full_layers_, due);
  for (Row& row : table.rows) at(view.sequences[static_cast<std::size_t>(row.sequence)]).columns->describe(row_of(row.layer, row.head), row);
  for (RowGroup& group : table.groups) {
    const Sequence& s = at(view.sequences[static_cast<std::size_t>(group.sequence)]);
    const std::int32_t index = layer_index_[static_cast<std::size_t>(group.layer)];
    group.queries = s.ring.view(index);
    if (!s.statistics.empty()) group.statistics = &s.statistics[static_cast<std::size_t>(index)];
    group.next_position = s.next_position;
    group.prompt = static_cast<std::int32_t>(s.prompt < 0 ? s.logical : s.prompt);
    group.surprisal = s.surprisal;
    group.settled = s.settled;
    if (provided_.accelerator == nullptr) continue;
    group.newest = s.columns->newest();
    group.prompt_slots = s.prompt_slots >= 0 ? s.prompt_slots : static_cast<std::int32_t>(std::ranges::lower_bound(group.newest, group.prompt) - group.newest.begin());
  }
  return table;
}

Evidence Keeper::evidence_of(const RowTable& table) const {
  return {.spec = spec_, .table = table, .basis = basis_, .moment = Moment::step_end, .output_projections = provided_.output_projections};
}

std::int64_t Keeper::workspace_bytes(const CacheView& view) const {
  if (provided_.accelerator == nullptr || policy_->trigger().never) return 0;
  std::vector<std::int32_t> all(view.sequences.size());
  std::iota(all.begin(), all.end(), 0);
  const RowTable table = table_of(view, all);
  return provided_.accelerator->workspace_bytes(*policy_, evidence_of(table));
}

Plan Keeper::plan(const CacheView& view) const {
  Plan plan;
  plan.version = version_;
  const Trigger trigger = policy_->trigger();
  const std::int64_t rows = static_cast<std::int64_t>(full_layers_.size()) * spec_.kv_heads;
  std::vector<std::int32_t> due;
  const Device there = make_rows(spec_, view, full_layers_, {}).device;  // a view that does not fit is refused on every step, not only at events
  require(there == device(), "cache: it lies on ", there.str(), ", the keeper works on ", device().str(), "; allowed one device, named by Provided::accelerator where it is not the CPU");
  for (std::size_t i = 0; i < view.sequences.size(); ++i) {
    const Sequence& s = at(view.sequences[i]);
    require<StateError>(s.pass == nullptr, "step: the prompt of sequence ", view.sequences[i], " has come to layer ", s.next_layer, "; allowed after narrow() of the last one");
    Occasion occasion{.rows = rows, .seen = s.logical, .prompt = s.prompt < 0 ? s.logical : s.prompt, .step = s.logical - s.asked};
    for (const std::int32_t l : full_layers_) {
      occasion.slot_bytes += spec_.kv_heads * slot_bytes(spec_, view.layers[static_cast<std::size_t>(l)]);
      for (std::int32_t h = 0; h < spec_.kv_heads; ++h) {
        const std::int32_t held = view.lengths.at(i, l * spec_.kv_heads + h), known = s.columns->length(row_of(l, h));
        require<StateError>(held == known, "step: sequence ", view.sequences[i], " holds ", held, " slots in layer ", l, ", head ", h, "; kvkeep has seen ", known,
                            " (observe every new token, and write an event's new lengths back)");
        occasion.slots += held;
      }
    }
    if (trigger.kind == Trigger::Kind::window) {
      const auto newest = s.columns->newest();
      occasion.unsettled = newest.end() - std::ranges::lower_bound(newest, s.settled);
    }
    require<StateError>(!needs_.surprisal || s.surprised == s.logical, "step: ", s.surprised, " of the ", s.logical, " tokens of sequence ", view.sequences[i], " have their surprisal; ", policy_->name(),
                        " reads that of all, give them with surprise()");
    for (const std::int32_t l : full_layers_) {
      const auto index = static_cast<std::size_t>(layer_index_[static_cast<std::size_t>(l)]);
      if (s.memory.empty() || std::ranges::all_of(std::span(s.memory).subspan(index * static_cast<std::size_t>(spec_.kv_heads), static_cast<std::size_t>(spec_.kv_heads)), [](const SpanRow& row) { return row.size() == 0; })) continue;
      require<StateError>(s.viewed[index] == s.logical, "step: layer ", l, " of sequence ", view.sequences[i], " has read its folded spans for ", s.viewed[index], " of ", s.logical,
                          " tokens; call view() behind each layer's attention");
    }
    if (!trigger.due(occasion)) continue;
    due.push_back(static_cast<std::int32_t>(i));
    for (const std::int32_t l : full_layers_) {
      const std::int64_t seen = s.prefix + s.ring.seen(layer_index_[static_cast<std::size_t>(l)]);
      require<StateError>(needs_.queries == 0 || seen == s.logical, "step: layer ", l, " has shown ", seen, " tokens of sequence ", view.sequences[i], ", other layers ",
                          s.logical, "; observe every full layer in each step");
    }
  }
  plan.bytes_before = plan.bytes_after = live_bytes(spec_, full_layers_, view);
  if (due.empty()) return plan;

  plan.table = table_of(view, due);
  const Evidence evidence = evidence_of(plan.table);
  plan.decision = provided_.accelerator == nullptr ? policy_->decide(evidence) : provided_.accelerator->decide(*policy_, evidence);

  if (!plan.decision.keep) return plan;
  const KeepSet& keep = *plan.decision.keep;
  for (const std::int32_t i : due) {
    const SequenceId id = view.sequences[static_cast<std::size_t>(i)];
    plan.cuts.push_back({.sequence = id, .logical_length = at(id).logical});
  }
  for (std::size_t r = 0; r < plan.table.rows.size(); ++r) {
    const Row& row = plan.table.rows[r];
    plan.bytes_after -= (row.length - keep.count(r)) * row.slot_bytes();
    Cut& cut = plan.cuts[r / static_cast<std::size_t>(spec_.kv_heads) % due.size()];  // rows lie in the order layer, sequence, head
    cut.length_before = std::max(cut.length_before, row.length);
    cut.length_after = std::max(cut.length_after, static_cast<std::int32_t>(keep.count(r)));
    cut.slots_before += row.length;
    cut.slots_after += keep.count(r);
  }
  if (plan.decision.fold) check_fold(plan);
  if (plan.table.page_size > 0) plan.pages = plan_pages(plan.table, keep, view.sequences, view.pages, view.shared_pages);
  return plan;
}

std::vector<ColumnTarget> Keeper::column_targets(const Plan& plan, const CacheView& view) {
  std::vector<ColumnTarget> targets;
  targets.reserve(plan.table.rows.size());
  for (const Row& row : plan.table.rows)
    targets.push_back(on_device(sequences_.at(view.sequences[static_cast<std::size_t>(row.sequence)])).target(row_of(row.layer, row.head), plan.decision.credit.has_value(), plan.decision.tally.has_value()));
  return targets;
}

DeviceColumns& Keeper::on_device(Sequence& sequence) { return static_cast<DeviceColumns&>(*sequence.columns); }

Report Keeper::apply(const Plan& plan, const CacheView& view) {
  require<StateError>(plan.version == version_, "apply: the plan is out of date, tokens were observed or rows were cut since; make a new one");
  Report report{.cuts = plan.cuts, .pages = plan.pages, .slots_dropped = 0, .slots_folded = 0, .far_bytes = 0, .bytes_before = plan.bytes_before, .bytes_after = plan.bytes_after, .bytes_moved = 0, .pages_freed = 0};
  if (plan.decision.keep) require_one_length(plan.table, *plan.decision.keep, view);
  std::vector<SpanRow> folded = fold_dropped(plan, view);
  take_pages(report.pages, view.pages);
  if (plan.decision.keep) {
    try {
      if (provided_.accelerator == nullptr) compact(plan.table, *plan.decision.keep, report.pages);
      else provided_.accelerator->move(plan.table, plan.decision, report.pages, column_targets(plan, view));
    } catch (...) {
      give_back_taken(plan.pages, report.pages, view.pages);
      throw;
    }
  }
  ++totals_.steps;
  for (const SequenceId id : view.sequences) {
    Sequence& s = sequences_.at(id);
    if (s.prompt < 0 && s.logical > 0) s.prompt = s.logical;
    s.asked = s.logical;
  }
  if (!plan.decision.keep) return report;
  const KeepSet& keep = *plan.decision.keep;
  report.bytes_moved = bytes_to_move(plan.table, keep, report.pages);
  report.pages_freed = settle_pages(report.pages, view);

  const float* credit = plan.decision.credit ? plan.decision.credit->data_ptr<float>() : nullptr;
  const float* tally = plan.decision.tally ? plan.decision.tally->data_ptr<float>() : nullptr;
  for (std::size_t r = 0; r < plan.table.rows.size(); ++r) {
    const Row& row = plan.table.rows[r];
    const auto i = static_cast<std::size_t>(row.sequence);
    Sequence& s = sequences_.at(view.sequences[i]);
    s.columns->settle(row_of(row.layer, row.head), keep, r, credit == nullptr ? nullptr : credit + row.first, tally == nullptr ? nullptr : tally + row.first);
    s.last_event = s.logical;
    view.lengths.at(i, row.layer * spec_.kv_heads + row.head) = static_cast<std::int32_t>(keep.count(r));
    report.slots_dropped += row.length - keep.count(r);
  }
  settle_folded(plan, view, std::move(folded), report);
  if (provided_.accelerator != nullptr)
    for (const RowGroup& group : plan.table.groups) {
      Sequence& s = sequences_.at(view.sequences[static_cast<std::size_t>(group.sequence)]);
      s.prompt_slots = group.prompt_slots;
      on_device(s).finish_event();
    }
  ++version_;
  ++totals_.events;
  totals_.sequences_cut += static_cast<std::int64_t>(report.cuts.size());
  totals_.slots_dropped += report.slots_dropped;
  totals_.slots_folded += report.slots_folded;
  totals_.bytes_moved += report.bytes_moved;
  totals_.pages_freed += report.pages_freed;
  return report;
}

void Keeper::truncate(SequenceId sequence, std::int64_t logical_length) {
  Sequence& s = const_cast<Sequence&>(at(sequence));
  require<StateError>(s.pass == nullptr, "truncate: the prompt of sequence ", sequence, " is on its way through the layers; allowed when it has ended");
  const std::int64_t taken = s.logical - logical_length;
  require(taken >= 0, "truncate: sequence ", sequence, " is ", s.logical, " tokens long; given ", logical_length, "; allowed at most that");
  require<StateError>(logical_length >= std::max<std::int64_t>(s.last_event, s.prefix), "truncate: sequence ", sequence, " was cut at length ", s.last_event,
                      " and what was dropped then is gone; given ", logical_length, "; allowed ", std::max<std::int64_t>(s.last_event, s.prefix), " or more");
  require<StateError>(needs_.queries == 0 || s.ring.can_forget(taken), "truncate: ", taken, " tokens of sequence ", sequence,
                      " reach behind what the query ring remembers; allowed at most ", QueryRing::kRollback);
  for (const QueryStatistics& statistics : s.statistics)
    require<StateError>(statistics.can_forget(taken), "truncate: ", taken, " tokens of sequence ", sequence, " reach behind what the query statistics can take back; allowed at most ",
                        QueryStatistics::kRollback);
  if (taken == 0) return;
  const auto newest = s.columns->newest();
  s.next_position = newest[newest.size() - static_cast<std::size_t>(taken)];
  s.columns->truncate(static_cast<std::int32_t>(taken));
  s.ring.forget(taken);
  for (QueryStatistics& statistics : s.statistics) statistics.forget(taken);
  s.logical = logical_length;
  s.asked = std::min(s.asked, s.logical);
  s.surprised = std::min(s.surprised, s.logical);
  if (static_cast<std::int64_t>(s.surprisal.size()) > s.next_position) s.surprisal.resize(static_cast<std::size_t>(s.next_position));
  for (std::int64_t& viewed : s.viewed) viewed = std::min(viewed, s.logical);
  ++version_;
}

std::int32_t Keeper::physical_length(SequenceId sequence, std::int32_t layer, std::int32_t head) const {
  return at(sequence).columns->length(row_of(layer, head));
}

std::span<const std::int32_t> Keeper::positions(SequenceId sequence, std::int32_t layer, std::int32_t head) const {
  return at(sequence).columns->positions(row_of(layer, head));
}

std::span<const float> Keeper::credit(SequenceId sequence, std::int32_t layer, std::int32_t head) const {
  return at(sequence).columns->credit(row_of(layer, head));
}

const Keeper::Sequence& Keeper::at(SequenceId sequence) const {
  const auto found = sequences_.find(sequence);
  require<StateError>(found != sequences_.end(), "kvkeep: sequence ", sequence, " is not known; allowed after join() and before leave()");
  return found->second;
}

std::int32_t Keeper::row_of(std::int32_t layer, std::int32_t head) const {
  require(layer >= 0 && layer < spec_.num_layers() && layer_index_[static_cast<std::size_t>(layer)] >= 0, "kvkeep: layer ", layer,
          " is not a full-attention layer of the model");
  require(head >= 0 && head < spec_.kv_heads, "kvkeep: KV head ", head, " is out of range; allowed 0 to ", spec_.kv_heads - 1);
  return layer_index_[static_cast<std::size_t>(layer)] * spec_.kv_heads + head;
}

}  // namespace kvkeep
