// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "kvkeep/core/error.h"
#include "kvkeep/layers/prompt_scores.h"
#include "kvkeep/policy/across_ranks.h"
#include "kvkeep/policy/policy.h"
#include "kvkeep/score/random.h"
#if KVKEEP_FOLDING
#include "kvkeep/policy/folded_memory.h"
#endif

namespace kvkeep {
namespace {

/// The rows of all ranks, as one machine would have them. Those of other ranks are Row::remote().
class Whole {
 public:
  Whole(const Evidence& evidence, const Limits& given)
      : spec(evidence.spec), table(evidence.table), limits{given.variant, given.padding, {}} {
    first_head_ = std::exchange(spec.first_head, 0);
    heads_ = std::exchange(spec.kv_heads, spec.whole_heads());
    spec.query_heads = spec.query_heads / heads_ * spec.kv_heads;
    spec.model_heads = 0;
    for (LayerSpec& layer : spec.layers) layer.sinks.clear();  // of these heads alone, and nothing attends here
    table.rows.clear();
    table.slots = 0;
    std::size_t ranges = 0;
    for (RowGroup& group : table.groups) {
      const RowGroup here = group;
      group.first_row = std::ssize(table.rows);
      for (std::int32_t h = 0; h < spec.kv_heads; ++h) {
        const auto own = static_cast<std::size_t>(here.first_row + (is_own(h) ? h - first_head_ : 0));
        Row row = evidence.table.rows[own];
        if (!is_own(h)) row = {.layer = row.layer, .sequence = row.sequence};
        row.head = h - first_head_;  // W_o has this rank's heads alone
        row.length = evidence.table.length_of(here, h, evidence.spec);
        row.first = std::exchange(table.slots, table.slots + row.length);
        table.rows.push_back(row);
        limits.rows.push_back(given.rows.empty() ? RowLimit{} : given.rows[own]);
        ranges += group.pinned.size();
      }
    }
    pins_.resize(ranges);
  }
  Whole(const Whole&) = delete;

  [[nodiscard]] std::int32_t ranks() const { return spec.kv_heads / heads_; }
  /// Calls body(place of the row, its group) for every row of a rank.
  template <class Body>
  void each_row_of(std::int32_t rank, const Body& body) const {
    for (const RowGroup& group : table.groups)
      for (std::int32_t h = rank * heads_; h < (rank + 1) * heads_; ++h)
        body(static_cast<std::size_t>(group.first_row + h), group);
  }
  [[nodiscard]] std::int64_t slots_of(std::int32_t rank) const {
    std::int64_t slots = 0;
    each_row_of(rank, [&](std::size_t r, const RowGroup&) { slots += table.rows[r].length; });
    return slots;
  }
  [[nodiscard]] std::int64_t most_slots() const {
    std::int64_t most = 0;
    for (std::int32_t rank = 0; rank < ranks(); ++rank) most = std::max(most, slots_of(rank));
    return most;
  }
  /// The part of flat numbers over all rows that belongs to this rank.
  [[nodiscard]] Tensor own(const Tensor& numbers) const {
    const std::int32_t rank = first_head_ / heads_;
    Tensor part = empty({slots_of(rank)}, Dtype::f32);
    float* to = part.data<float>();
    each_row_of(rank, [&](std::size_t r, const RowGroup&) {
      to = std::copy_n(numbers.data<float>() + table.rows[r].first, table.rows[r].length, to);
    });
    return part;
  }
  /// Room for the pinned ranges of every row.
  [[nodiscard]] SlotRange* pins() { return pins_.data(); }

  ModelSpec spec;
  RowTable table;
  Limits limits;

 private:
  [[nodiscard]] bool is_own(std::int32_t head) const { return head >= first_head_ && head < first_head_ + heads_; }

  std::int32_t first_head_ = 0, heads_ = 0;  ///< of this rank
  std::vector<SlotRange> pins_;
};

/// True if rows of a layer may differ in length, on any rank.
bool uneven(const Evidence& evidence) {
  return std::ranges::any_of(evidence.table.groups, [](const RowGroup& group) { return !group.extra_slots.empty(); });
}

/// What begins every message.
struct Head {
  std::uint64_t event = 0;   ///< ranks must agree on it
  std::uint64_t failed = 0;  ///< 1: the text of an error follows
};

/// Messages of one size, one from each rank.
class Messages {
 public:
  Messages(std::size_t bytes, std::int32_t ranks)
      : size_(sizeof(Head) + bytes), mine_(size_), all_(size_ * static_cast<std::size_t>(ranks)) {}

  /// Throws RankError if a rank failed or is in another event.
  void exchange(Collective& ranks, Head own) {
    std::memcpy(mine_.data(), &own, sizeof own);
    ranks.all_gather(mine_, all_);
    for (std::int32_t r = 0; r < ranks.size(); ++r) {
      Head head;
      std::memcpy(&head, of(r).data() - sizeof head, sizeof head);
      if (head.failed != 0) {
        const auto* words = reinterpret_cast<const char*>(of(r).data());
        refuse<RankError>("ranks: rank ", r, " failed: ", std::string(words, strnlen(words, of(r).size())));
      }
      KVKEEP_REQUIRE_AS(RankError, head.event == own.event, "ranks: ranks ", ranks.rank(), " and ", r,
                        " are in different events; allowed the same policy, sequences, tokens and calls on every rank");
    }
  }
  [[nodiscard]] std::span<std::byte> mine() { return std::span(mine_).subspan(sizeof(Head)); }
  [[nodiscard]] std::span<const std::byte> of(std::int32_t rank) const {
    return std::span(all_).subspan(static_cast<std::size_t>(rank) * size_ + sizeof(Head), size_ - sizeof(Head));
  }

 private:
  std::size_t size_;
  std::vector<std::byte> mine_, all_;
};

template <class T>
void put(std::span<std::byte>& to, const T* numbers, std::size_t count) {
  if (count > 0) std::memcpy(to.data(), numbers, count * sizeof(T));
  to = to.subspan(count * sizeof(T));
}
template <class T>
void take(std::span<const std::byte>& from, T* numbers, std::size_t count) {
  if (count > 0) std::memcpy(numbers, from.data(), count * sizeof(T));
  from = from.subspan(count * sizeof(T));
}

class RanksEvent final : public Event {
 public:
  /// `expected`: what other ranks wait for first. `masses`: layers that are ranked by shares of attention.
  RanksEvent(Collective& ranks, const Evidence& evidence, const Limits& limits, std::string_view policy,
             std::unique_ptr<Event> own, AcrossHeads expected, bool masses)
      : ranks_(ranks),
        evidence_(evidence),
        limits_(limits),
        policy_(policy),
        own_(std::move(own)),
        expected_(expected),
        masses_(masses) {}

  [[nodiscard]] WindowAttention attend(std::int32_t window, bool official, WindowNeeds needs) override {
    return or_tell([&] { return own_->attend(window, official, needs); });
  }

  [[nodiscard]] Scores score(const Scorer& scorer, const WindowAttention& seen) override {
    return or_tell([&] { return own_->score(scorer, seen); });
  }

  [[nodiscard]] Scores share(const Scores& scores, Sharing share) override {
    if (share == Sharing::per_head && gathered_.empty()) return own_->share(scores, share);
    gather({scores.data});
    gathered_[0] = together().share({gathered_[0]}, share).data;
    alike_ = true;  // under per_head they were averaged, and still are
    return {whole().own(gathered_[0])};
  }

  void allot(const Allocator& allocator, const Scores& scores, WindowAttention seen, Decision& decision) override {
    const AcrossHeads needs = allocator.across_heads();
    if (needs == AcrossHeads::scores) {
      gather({scores.data});
      Decision of_all;
      together().allot(allocator, {gathered_[0]}, {}, of_all);
      return take_own(*of_all.keep, allocator.ragged(), decision);
    }
    expected_ = needs == AcrossHeads::counts && alike_ ? AcrossHeads::nothing : needs;
    if (needs == AcrossHeads::tops)
      seen.tops = tops_of_all(or_tell([&] { return allocator.tops(evidence_, limits_, seen); }));
    or_tell([&] { own_->allot(allocator, scores, std::move(seen), decision); });
    if (needs == AcrossHeads::counts && !alike_)
      decision.kept_per_head = gather_rows(counts_of(*decision.keep));
    else if (uneven(evidence_))
      for (std::size_t r = 0; r < whole().table.rows.size(); ++r) {
        const std::size_t group = r / static_cast<std::size_t>(whole().spec.kv_heads);
        decision.kept_per_head.push_back(alike_
                                             ? static_cast<std::int32_t>(decision.keep->count(
                                                   group * static_cast<std::size_t>(evidence_.spec.kv_heads)))
                                             : std::min(whole().table.rows[r].length, whole().limits.rows[r].budget));
      }
  }

  [[nodiscard]] PromptScores prompt_scores(const PromptScoreOptions& options) override {
    using By = PromptScoreOptions::By;
    if (options.by == By::last_query) {
      expected_ = AcrossHeads::scores;
      const Tensor products = or_tell([&] { return last_query_products(evidence_); });
      gathered_.clear();
      gather({products});
      return {.tokens = pooled_over_heads(everything(), gathered_[0], options.pool)};
    }
    PromptScores own = or_tell([&]() -> PromptScores {
      if (options.by == By::weighted) return {.heads = window_sums(evidence_, options.window, options.weights)};
      return own_->prompt_scores(options);
    });
    gather({own.heads, own.sums});
    own.tokens = sum_over_heads(everything(), gathered_[0], options.window, options.sinks);
    return own;
  }

  [[nodiscard]] ChosenTokens rank(const PromptScores& scores, std::span<PromptRanks* const> ranks, bool list) override {
    return together().rank({.tokens = scores.tokens, .sums = masses_ ? gathered_[1] : Tensor{}}, ranks, list);
  }
  [[nodiscard]] ChosenTokens choose(const Tensor& scores, std::int32_t best, std::int32_t window,
                                    const std::vector<bool>& of) override {
    return together().choose(scores, best, window, of);
  }

 private:
  [[nodiscard]] Whole& whole() {
    if (whole_ == nullptr) whole_ = std::make_unique<Whole>(evidence_, limits_);
    return *whole_;
  }
  /// Evidence of all ranks' rows: lengths, and data of this rank's alone.
  [[nodiscard]] const Evidence& everything() {
    if (!everything_)
      everything_.emplace(Evidence{.spec = whole().spec,
                                   .table = whole().table,
                                   .basis = evidence_.basis,
                                   .moment = evidence_.moment,
                                   .output_projections = evidence_.output_projections});
    return *everything_;
  }
  [[nodiscard]] Event& together() {
    if (together_ == nullptr) together_ = host().begin(everything(), whole().limits, LayerDemand{.policy = policy_});
    return *together_;
  }
  [[nodiscard]] std::uint64_t event() {
    std::uint64_t all = 0;
    const auto mix = [&all](std::int64_t x) { all = mixed_bits(all ^ static_cast<std::uint64_t>(x)); };
    for (const char c : policy_) mix(c);
    for (const RowGroup& group : whole().table.groups)
      mix(group.layer), mix(group.next_position), mix(group.seen.tokens);
    for (const Row& row : whole().table.rows) mix(row.length);
    return all;
  }
  /// Whole numbers of a message with scores: what is protected in each row.
  [[nodiscard]] std::size_t guards() {
    std::size_t ints = 0;
    whole().each_row_of(ranks_.rank(),
                        [&](std::size_t, const RowGroup& group) { ints += 3 + 2 * group.pinned.size(); });
    return ints * sizeof(std::int32_t);
  }
  [[nodiscard]] std::size_t bytes_of_scores() {
    return guards() + (masses_ ? 2 : 1) * static_cast<std::size_t>(whole().most_slots()) * sizeof(float);
  }
  static constexpr std::size_t kBytesOfARow = 4;
  [[nodiscard]] std::size_t bytes_of_rows() const { return evidence_.table.rows.size() * kBytesOfARow; }

  /// If `body` throws while other ranks wait for a message, they get the error instead.
  template <class Body>
  auto or_tell(const Body& body) -> decltype(body()) {
    try {
      return body();
    } catch (const std::exception& error) {
      if (expected_ != AcrossHeads::nothing) {
        Messages messages(expected_ == AcrossHeads::scores ? bytes_of_scores() : bytes_of_rows(), ranks_.size());
        const std::string_view words = error.what();
        std::span<std::byte> to = messages.mine();
        put(to, words.data(), std::min(words.size(), to.size()));
        try {
          messages.exchange(ranks_, {event(), 1});
        } catch (const Error&) {  // it says what is thrown below, or that another rank failed too
        }
      }
      throw;
    }
  }

  /// Fills gathered_, one array for each of `own`, and what is protected in the rows of other ranks. Once an event.
  void gather(std::initializer_list<Tensor> own) {
    if (!gathered_.empty()) return;
    Messages messages(bytes_of_scores(), ranks_.size());
    std::span<std::byte> to = messages.mine();
    for (std::size_t r = 0; r < evidence_.table.rows.size(); ++r) {
      const Protected none, &guarded = limits_.rows.empty() ? none : limits_.rows[r].guarded;
      const std::int32_t head[] = {guarded.sinks, guarded.recents, guarded.ranges};
      put(to, head, 3);
      put(to, guarded.pins, static_cast<std::size_t>(guarded.ranges));
      const RowGroup& group = evidence_.table.groups[r / static_cast<std::size_t>(evidence_.spec.kv_heads)];
      to = to.subspan((group.pinned.size() - static_cast<std::size_t>(guarded.ranges)) * sizeof(SlotRange));
    }
    const auto most = static_cast<std::size_t>(whole().most_slots());
    for (const Tensor* array = own.begin(); array != own.end() && array - own.begin() < (masses_ ? 2 : 1); ++array) {
      std::span<std::byte> room = to.subspan(static_cast<std::size_t>(array - own.begin()) * most * sizeof(float));
      put(room, array->data<float>(), static_cast<std::size_t>(array->numel()));
    }
    const Head head{event(), 0};
    expected_ = AcrossHeads::nothing;
    messages.exchange(ranks_, head);
    SlotRange* room = whole().pins();
    for (int a = 0; a < (masses_ ? 2 : 1); ++a) gathered_.push_back(empty({whole().table.slots}, Dtype::f32));
    for (std::int32_t rank = 0; rank < ranks_.size(); ++rank) {
      std::span<const std::byte> from = messages.of(rank), numbers = from.subspan(guards());
      whole().each_row_of(rank, [&](std::size_t r, const RowGroup& group) {
        std::int32_t three[3];
        take(from, three, 3);
        SlotRange* const pins = room;
        room += group.pinned.size();
        std::span<const std::byte> ranges = from.subspan(0, group.pinned.size() * sizeof(SlotRange));
        take(ranges, pins, static_cast<std::size_t>(three[2]));
        from = from.subspan(group.pinned.size() * sizeof(SlotRange));
        Protected& guarded = whole().limits.rows[r].guarded;
        guarded = {.sinks = three[0], .recents = three[1], .ranges = three[2], .pins = pins};
        for (std::int32_t i = 0; i < three[2]; ++i) guarded.pinned += pins[i].to - pins[i].from;
      });
      for (Tensor& array : gathered_) {
        std::span<const std::byte> of_array = numbers;
        whole().each_row_of(rank, [&](std::size_t r, const RowGroup&) {
          const Row& row = whole().table.rows[r];
          take(of_array, array.data<float>() + row.first, static_cast<std::size_t>(row.length));
        });
        numbers = numbers.subspan(most * sizeof(float));
      }
    }
  }

  /// One number of every row of all ranks, from those of this rank's rows.
  template <class T>
  [[nodiscard]] std::vector<T> gather_rows(const std::vector<T>& own) {
    static_assert(sizeof(T) == kBytesOfARow);
    Messages messages(bytes_of_rows(), ranks_.size());
    std::span<std::byte> to = messages.mine();
    put(to, own.data(), evidence_.table.rows.size());
    expected_ = AcrossHeads::nothing;
    messages.exchange(ranks_, {event(), 0});
    std::vector<T> all(whole().table.rows.size());
    for (std::int32_t rank = 0; rank < ranks_.size(); ++rank) {
      std::span<const std::byte> from = messages.of(rank);
      whole().each_row_of(rank, [&](std::size_t r, const RowGroup&) { take(from, &all[r], 1); });
    }
    return all;
  }
  [[nodiscard]] std::vector<std::int32_t> counts_of(const KeepSet& keep) const {
    std::vector<std::int32_t> counts;
    for (std::size_t r = 0; r < evidence_.table.rows.size(); ++r)
      counts.push_back(static_cast<std::int32_t>(keep.count(r)));
    return counts;
  }
  /// For every row of this rank the largest of the numbers over all heads of its layer.
  [[nodiscard]] std::vector<float> tops_of_all(std::vector<float> own) {
    const std::vector<float> all = gather_rows(own);
    for (std::size_t g = 0; g < evidence_.table.groups.size(); ++g) {
      const auto of_all = all.begin() + whole().table.groups[g].first_row;
      std::fill_n(own.begin() + evidence_.table.groups[g].first_row, evidence_.spec.kv_heads,
                  *std::max_element(of_all, of_all + whole().spec.kv_heads));
    }
    return own;
  }

  void take_own(const KeepSet& of_all, bool ragged, Decision& decision) {
    KeepSet& keep = decision.keep.emplace();
    keep.indptr.push_back(0);
    const auto own_rows = [&](const auto& body) {
      whole().each_row_of(ranks_.rank(), [&](std::size_t r, const RowGroup&) { body(r); });
    };
    own_rows([&](std::size_t r) { keep.indptr.push_back(keep.indptr.back() + of_all.count(r)); });
    keep.slots = empty({keep.indptr.back()}, Dtype::i32);
    std::int32_t* to = keep.slots.data<std::int32_t>();
    own_rows([&](std::size_t r) { to = std::ranges::copy(of_all.row(r), to).out; });
    for (std::size_t r = 0; ragged && r < whole().table.rows.size(); ++r)
      decision.kept_per_head.push_back(static_cast<std::int32_t>(of_all.count(r)));
  }

  Collective& ranks_;
  const Evidence& evidence_;
  const Limits& limits_;
  const std::string_view policy_;
  const std::unique_ptr<Event> own_;
  AcrossHeads expected_;
  const bool masses_;
  bool alike_ = false;  ///< all heads rank their slots alike
  std::unique_ptr<Whole> whole_;
  std::optional<Evidence> everything_;
  std::unique_ptr<Event> together_;
  std::vector<Tensor> gathered_;  ///< f32 [slots of all ranks]
};

/// What ranks wait for first in an event of such a policy.
AcrossHeads spoken(const Demand& demand) {
  for (const Sharing share : {demand.scorer.sharing(), demand.share})
    if (share != Sharing::per_layer_per_head && share != Sharing::per_head) return AcrossHeads::scores;
  return demand.allocator.across_heads();
}

class AcrossRanks final : public Machine {
 public:
  AcrossRanks(std::shared_ptr<Collective> ranks, std::shared_ptr<Machine> own)
      : Machine((own == nullptr ? host() : *own).memory(), {.rank = ranks->rank(), .of = ranks->size()}),
        ranks_(std::move(ranks)),
        given_(std::move(own)),
        own_(given_ == nullptr ? host() : *given_) {}

  [[nodiscard]] std::vector<std::string> problems(const Ask& ask, const ModelSpec& spec) const override {
    std::vector<std::string> found = own_.problems(ask, spec);
    const auto* const demand = std::get_if<Demand>(&ask);
    if (demand != nullptr && demand->scorer.across_heads() != AcrossHeads::nothing &&
        spec.whole_heads() != spec.kv_heads)
      found.push_back(text("ranks: scorer ", demand->scorer.name(),
                           " reads the rows of other heads, of which ranks hold a part; allowed scorers that read one "
                           "row"));
    if (is_host() || std::holds_alternative<HostDemand>(ask)) return found;
    if (demand == nullptr)
      found.push_back(text("ranks: ", std::get<LayerDemand>(ask).policy,
                           " narrows by the heads of all ranks, which are gathered on the host; given ", device().str(),
                           "; allowed on the CPU"));
    else if (spoken(*demand) != AcrossHeads::nothing)
      found.push_back(text("ranks: ", demand->policy,
                           " decides with the heads of other ranks, which are gathered on the host; given ",
                           device().str(), "; allowed on the CPU, or policies whose rows decide by themselves"));
    return found;
  }
#if KVKEEP_FOLDING
  [[nodiscard]] std::unique_ptr<FoldedMemory> folded_memory(const ModelSpec& spec,
                                                            const MemoryOptions& memory) override {
    return own_.folded_memory(spec, memory);
  }
#endif
  /// On a device rows decide by themselves.
  [[nodiscard]] std::unique_ptr<Event> begin(const Evidence& evidence, const Limits& limits, const Ask& ask) override {
    std::unique_ptr<Event> own = own_.begin(evidence, limits, ask);
    const auto* const layer = std::get_if<LayerDemand>(&ask);
    const AcrossHeads first = layer == nullptr ? spoken(std::get<Demand>(ask)) : AcrossHeads::scores;
    if (!is_host() || (first == AcrossHeads::nothing && !uneven(evidence))) return own;
    return std::make_unique<RanksEvent>(*ranks_, evidence, limits,
                                        layer == nullptr ? std::get<Demand>(ask).policy : layer->policy, std::move(own),
                                        first, layer != nullptr && layer->masses);
  }
  std::int64_t workspace(const KVPolicy& policy, const Evidence& evidence, bool take) override {
    return own_.workspace(policy, evidence, take);
  }
  void move(const RowTable& table, const Decision& decision, std::span<const PageMove> pages,
            std::span<const ColumnTarget> columns) override {
    own_.move(table, decision, pages, columns);
  }
  void read_counts(std::span<std::int32_t> counts) override { own_.read_counts(counts); }
  void use_workspace(Tensor memory) override { own_.use_workspace(std::move(memory)); }

 private:
  const std::shared_ptr<Collective> ranks_;
  const std::shared_ptr<Machine> given_;
  Machine& own_;
};

}  // namespace

std::shared_ptr<Machine> across_ranks(std::shared_ptr<Collective> ranks, std::shared_ptr<Machine> own) {
  KVKEEP_REQUIRE(ranks != nullptr && ranks->size() >= 1 && ranks->rank() >= 0 && ranks->rank() < ranks->size(),
                 "ranks: ", ranks == nullptr ? "no collective" : "a rank that is not among them",
                 "; allowed a collective whose rank is from 0 to its size - 1");
  return std::make_shared<AcrossRanks>(std::move(ranks), std::move(own));
}

}  // namespace kvkeep
