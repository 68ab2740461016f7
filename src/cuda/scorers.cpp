// SPDX-License-Identifier: Apache-2.0
/// Scorers on a device: from options to kernels.

#include <mutex>
#include <typeindex>
#include <unordered_map>

#include "event.h"
#include "expected.h"
#include "keydiff.h"
#include "kvkeep/score/cur.h"
#include "kvkeep/score/defensive.h"
#include "kvkeep/score/expected.h"
#include "kvkeep/score/given.h"
#include "kvkeep/score/h2o.h"
#include "kvkeep/score/keydiff.h"
#include "kvkeep/score/knorm.h"
#include "kvkeep/score/random.h"
#include "kvkeep/score/recency.h"
#include "kvkeep/score/rkv.h"
#include "kvkeep/score/rpc.h"
#include "kvkeep/score/snapkv.h"
#include "kvkeep/score/tova.h"
#include "kvkeep/score/triattention.h"
#include "kvkeep/score/vase.h"
#include "rkv.h"
#include "row_body.h"
#include "triattention.h"

namespace kvkeep::cuda {
namespace {

/// What programs, and the library itself, have registered.
class RowScorers {
 public:
  void add(std::type_index scorer, RowScorerLaunch launch) {
    const std::lock_guard lock(mutex_);
    all_[scorer] = launch;
  }
  /// `run` is null: nothing.
  [[nodiscard]] RowScorerLaunch find(std::type_index scorer) {
    const std::lock_guard lock(mutex_);
    const auto found = all_.find(scorer);
    return found == all_.end() ? RowScorerLaunch{} : found->second;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::type_index, RowScorerLaunch> all_;
};

RowScorers& row_scorers() {
  static RowScorers all;
  return all;
}

CudaEvent::Reader reader_of(const HistoryOptions& history) {
  return history.group == GroupReduce::max_logit || history.window == WindowReduce::worst
             ? CudaEvent::Reader::other
             : CudaEvent::Reader::attention;
}

/// As read_window(): sets `windows` and `attention`.
void read_window(CudaEvent& event, const WindowReading& reading, const WindowAttention& seen, bool in_place,
                 ScoredRows& rows) {
  using Kind = WindowReading::Kind;
  const DeviceWindow& asked = event.asked();
  const bool newest = reading.kind == Kind::newest;
  if ((newest && seen.newest.defined()) || (reading.kind == Kind::usage && seen.usage.defined() && !in_place &&
                                            asked.window == reading.window && !asked.official)) {
    rows.windows = asked.windows;
    rows.attention = (newest ? seen.newest : seen.usage).data<float>();
    return;
  }
  rows.sum = reading.kind == Kind::sum;
  std::int32_t window = reading.window;
  if (rows.sum) {
    // No row has more queries than came after its last event. Before the first one that is all: those of a narrowed
    // prompt are not among the newest positions.
    std::int32_t fresh = 1;
    for (const RowGroup& group : event.evidence.table.groups)
      fresh = std::max(fresh, event.evidence.table.rows[static_cast<std::size_t>(group.first_row)].tally_length == 0
                                  ? group.queries.count
                                  : static_cast<std::int32_t>(group.newest.size()));
    window = std::min(window, fresh);
  }
  const DeviceWindow own = event.ask(window, false, reader_of(reading.history), rows.sum);
  rows.windows = own.windows;
  if (reading.kind == Kind::history) {
    rows.attention = event.attend_history(own, reading);
    return;
  }
  rows.attention = event.flat();
  event.attend(own, reading.kind == Kind::usage ? rows.attention : nullptr, newest ? rows.attention : nullptr,
               rows.sum ? rows.attention : nullptr);
}

/// True if every row that is due has a window.
bool all_ask(const CudaEvent& event) {
  const RowTable& table = event.evidence.table;
  for (std::size_t r = 0; r < table.rows.size(); ++r) {
    const RowLimit& limit = event.limits.rows[r];
    const std::int32_t queries = table.groups[r / static_cast<std::size_t>(event.evidence.spec.kv_heads)].queries.count;
    if (limit.due && std::min({queries, table.rows[r].length - 1, limit.budget}) < 1) return false;
  }
  return true;
}

/// Scorers that are a body run that of the CPU.
float* score_row_by_row(CudaEvent& event, const Scorer& scorer, const WindowAttention& seen) {
  const RowScorerLaunch launch = row_scorers().find(typeid(scorer));
  if (scorer.needs().given_scores) require_given(scorer.name(), event.evidence, event.limits);
  ScoredRows rows;
  if (launch.reading != nullptr) read_window(event, launch.reading(scorer), seen, launch.in_place, rows);
  rows.evidence = event.arguments;
  rows.values = event.value_element;
  rows.value_dim = event.evidence.spec.value_dim;
  rows.next_positions = event.next_positions;
  rows.accumulates = scorer.accumulates();
  rows.scores = launch.in_place ? rows.attention : event.flat();
  if (!launch.as_read || !all_ask(event)) event.launch(launch, scorer, rows);
  return rows.scores;
}

float* score(CudaEvent& event, const Expected& scorer, const WindowAttention&) {
  const ExpectedOptions& options = scorer.options();
  const Evidence& evidence = event.evidence;
  std::int32_t held = 1;
  for (const RowGroup& group : evidence.table.groups) held = std::max(held, group.queries.count);
  ExpectedArguments arguments;
  arguments.evidence = event.arguments;
  arguments.values = event.value_element;
  arguments.value_dim = evidence.spec.value_dim;
  arguments.next_positions = event.next_positions;
  arguments.post_rope = evidence.basis == QueryBasis::post_rope;
  arguments.future = options.future;
  arguments.sink = options.sink;
  arguments.covariance = options.covariance;
  arguments.value_norm = options.value_norm;
  arguments.epsilon = options.epsilon;
  arguments.queries = std::min(options.queries, held);
  arguments.matrix_unit = options.matrix_unit;
  if (expected_multiplies_many(arguments)) arguments.blas = event.blas();
  arguments.slots = evidence.table.slots;
  arguments.scores = event.flat();
  arguments.workspace = event.take<std::byte>(expected_workspace_bytes(arguments));
  event.launch(launch_expected, arguments);
  return arguments.scores;
}

float* score(CudaEvent& event, const Rkv& scorer, const WindowAttention&) {
  const RkvOptions& options = scorer.options();
  const DeviceWindow window = event.ask(options.window, false, reader_of({.group = options.group}));
  RkvArguments arguments{.evidence = event.arguments,
                         .windows = window.windows,
                         .queries = window.queries,
                         .options = options,
                         .slots = event.evidence.table.slots,
                         .scores = event.flat()};
  arguments.workspace = event.take<std::byte>(rkv_workspace_bytes(arguments));
  event.launch(launch_rkv, arguments);
  return arguments.scores;
}

float* score(CudaEvent& event, const KeyDiff&, const WindowAttention&) {
  KeyDiffArguments arguments{.evidence = event.arguments,
                             .scores = event.flat(),
                             .workspace = event.take<std::byte>(keydiff_workspace_bytes(event.arguments))};
  event.launch(launch_keydiff, arguments);
  return arguments.scores;
}

float* score(CudaEvent& event, const TriAttention& scorer, const WindowAttention&) {
  const Calibration& calibration = scorer.calibration();
  const ModelSpec& spec = event.evidence.spec;
  const std::int32_t group = calibration.query_heads(spec.full_layers()) / spec.whole_heads(),
                     first = spec.first_head * group;
  // [layers, Hq, F]; a calibration may lack layers without rows, which are not needed here
  const auto all_heads = [&](auto&& put) {
    for (std::int32_t l = 0; l < spec.num_layers(); ++l)
      for (std::int32_t h = first; h < first + spec.kv_heads * group; ++h) {
        const auto found = calibration.heads.find({l, h});
        for (std::size_t f = 0; f < static_cast<std::size_t>(calibration.pairs()); ++f)
          put(found == calibration.heads.end() ? nullptr : &found->second, f);
      }
  };
  TriAttentionArguments arguments{.evidence = event.arguments,
                                  .next_positions = event.next_positions,
                                  .options = scorer.options(),
                                  .slots = event.evidence.table.slots,
                                  .scores = event.flat()};
  arguments.evidence.group = group;
  arguments.q_mean = event.constant<float>(&calibration, [&] {
    std::vector<float> all;
    all_heads([&](const Calibration::Head* head, std::size_t f) {
      all.push_back(head == nullptr ? 0.0F : head->q_mean[f].real());
      all.push_back(head == nullptr ? 0.0F : head->q_mean[f].imag());
    });
    return all;
  });
  arguments.q_abs_mean = event.constant<float>(&calibration.heads, [&] {
    std::vector<float> all;
    all_heads([&](const Calibration::Head* head, std::size_t f) {
      all.push_back(head == nullptr ? 0.0F : head->q_abs_mean[f]);
    });
    return all;
  });
  arguments.workspace = event.take<std::byte>(triattention_workspace_bytes(arguments));
  event.launch(launch_triattention, arguments);
  return arguments.scores;
}

template <class S>
std::pair<const std::type_index, Score> scorer_kernels() {
  return {typeid(S), [](CudaEvent& event, const Scorer& scorer, const WindowAttention& seen) {
            return score(event, static_cast<const S&>(scorer), seen);
          }};
}

}  // namespace

void register_row_scorer(std::type_index scorer, RowScorerLaunch launch) { row_scorers().add(scorer, launch); }

Score kernels_of(const Scorer& scorer) {
  static const std::unordered_map<std::type_index, Score> all = {scorer_kernels<Expected>(), scorer_kernels<KeyDiff>(),
                                                                 scorer_kernels<Rkv>(), scorer_kernels<TriAttention>()};
  static const bool own = (register_scorer<Cur>(), register_scorer<Defensive>(), register_scorer<Given>(),
                           register_scorer<H2O>(), register_scorer<Knorm>(), register_scorer<RandomAttention>(),
                           register_scorer<RandomScorer>(), register_scorer<Recency>(), register_scorer<Rpc>(),
                           register_scorer<SnapKV>(), register_scorer<Tova>(), register_scorer<Vase>(), true);
  static_cast<void>(own);
  if (const auto found = all.find(typeid(scorer)); found != all.end()) return found->second;
  return row_scorers().find(typeid(scorer)).run == nullptr ? nullptr : score_row_by_row;
}

}  // namespace kvkeep::cuda
