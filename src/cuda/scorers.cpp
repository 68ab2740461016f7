/// Scorers on a device: from options to kernels.

#include <mutex>
#include <typeindex>
#include <unordered_map>

#include "event.h"
#include "expected.h"
#include "h2o.h"
#include "keydiff.h"
#include "knorm.h"
#include "kvkeep/score/cur.h"
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
#include "rkv.h"
#include "row_scorers.h"
#include "rpc.h"
#include "snapkv.h"
#include "tova.h"
#include "triattention.h"

namespace kvkeep::cuda {
namespace {

/// What programs have registered.
class RowScorers {
 public:
  using Launch = void (*)(const RowScorerCall&);
  void add(std::type_index scorer, Launch launch) {
    const std::lock_guard lock(mutex_);
    all_[scorer] = launch;
  }
  [[nodiscard]] Launch find(std::type_index scorer) {
    const std::lock_guard lock(mutex_);
    const auto found = all_.find(scorer);
    return found == all_.end() ? nullptr : found->second;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::type_index, Launch> all_;
};

RowScorers& row_scorers() {
  static RowScorers all;
  return all;
}

/// Scorers of one row run the body of the CPU.
float* score_row_by_row(CudaEvent& event, const Scorer& scorer, const WindowAttention&) {
  if (scorer.needs().given_scores) require_given(scorer.name(), event.evidence, event.limits);
  float* const scores = event.flat();
  event.launch(row_scorers().find(typeid(scorer)),
               {.scorer = scorer,
                .evidence = event.arguments,
                .values = scorer.needs().values ? event.value_element : Element::f32,
                .value_dim = event.evidence.spec.value_dim,
                .scores = scores});
  return scores;
}

CudaEvent::Reader reader_of(GroupReduce group) {
  return group == GroupReduce::max_logit ? CudaEvent::Reader::other : CudaEvent::Reader::attention;
}

float* score(CudaEvent& event, const H2O& scorer, const WindowAttention&) {
  // Only queries that came after the last event count, so the window need not be longer than their number. Before the
  // first event that is all: those of a narrowed prompt are not among the newest positions.
  std::int32_t fresh = 1;
  for (const RowGroup& group : event.evidence.table.groups)
    fresh = std::max(fresh, event.evidence.table.rows[static_cast<std::size_t>(group.first_row)].tally_length == 0
                                ? group.queries.count
                                : static_cast<std::int32_t>(group.newest.size()));
  const std::int32_t window = std::min(scorer.options().window, fresh);
  H2OArguments arguments{.evidence = event.arguments,
                         .queries = event.ask(window, false).queries,
                         .window = window,
                         .scores = event.flat()};
  arguments.workspace = event.take<std::byte>(h2o_workspace_bytes(arguments));
  event.launch(launch_h2o, arguments);
  return arguments.scores;
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
  arguments.slots = evidence.table.slots;
  arguments.scores = event.flat();
  arguments.workspace = event.take<std::byte>(expected_workspace_bytes(arguments));
  event.launch(launch_expected, arguments);
  return arguments.scores;
}

float* score(CudaEvent& event, const Rpc& scorer, const WindowAttention&) {
  const RpcOptions& options = scorer.options();
  if (options.heads == RpcOptions::Heads::all) require_even_heads(event, scorer.name(), "group");
  const DeviceWindow window = event.ask(options.window, false);
  RpcArguments arguments{.evidence = event.arguments,
                         .windows = window.windows,
                         .queries = window.queries,
                         .options = options,
                         .slots = event.evidence.table.slots,
                         .scores = event.flat()};
  arguments.workspace = event.take<std::byte>(rpc_workspace_bytes(arguments));
  event.launch(launch_rpc, arguments);
  return arguments.scores;
}

float* score(CudaEvent& event, const Rkv& scorer, const WindowAttention&) {
  const RkvOptions& options = scorer.options();
  const DeviceWindow window = event.ask(options.window, false, reader_of(options.group));
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

float* score(CudaEvent& event, const Tova& scorer, const WindowAttention& seen) {
  const bool all_heads = scorer.options().heads == TovaOptions::Heads::all;
  if (all_heads) require_even_heads(event, scorer.name(), "group");
  const TovaArguments arguments{.evidence = event.arguments,
                                .windows = event.asked().windows,
                                .all_heads = all_heads,
                                .newest = seen.newest.data<float>(),
                                .scores = event.flat()};
  event.launch(launch_tova, arguments);
  return arguments.scores;
}

float* score(CudaEvent& event, const KeyDiff&, const WindowAttention&) {
  KeyDiffArguments arguments{.evidence = event.arguments,
                             .scores = event.flat(),
                             .workspace = event.take<std::byte>(keydiff_workspace_bytes(event.arguments))};
  event.launch(launch_keydiff, arguments);
  return arguments.scores;
}

float* score(CudaEvent& event, const Knorm&, const WindowAttention&) {
  KnormArguments arguments{.evidence = event.arguments, .scores = event.flat()};
  event.launch(launch_knorm, arguments);
  return arguments.scores;
}

float* score(CudaEvent& event, const SnapKV& scorer, const WindowAttention& seen) {
  const SnapKVOptions& options = scorer.options();
  const bool average = options.style == SnapKVOptions::Style::snapkv;
  const DeviceWindow& asked = event.asked();
  const bool known = average && seen.usage.defined() && asked.window == options.window && !asked.official;
  const GroupReduce group = average ? GroupReduce::mean_prob : GroupReduce::max_logit;
  const DeviceWindow window = known ? asked : event.ask(options.window, false, reader_of(group));
  const float* attention = known ? seen.usage.data<float>() : nullptr;
  if (!average) {
    attention = event.attend_history(window, {.group = group});
  } else if (!known) {
    float* usage = event.flat();
    event.attend(window, usage, nullptr);
    attention = usage;
  }
  SnapKVArguments arguments{.evidence = event.arguments,
                            .windows = window.windows,
                            .attention = attention,
                            .pool = options.pool,
                            .average = average,
                            .scores = event.flat()};
  event.launch(launch_snapkv, arguments);
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

void register_row_scorer(std::type_index scorer, void (*launch)(const RowScorerCall&)) {
  row_scorers().add(scorer, launch);
}

Score kernels_of(const Scorer& scorer) {
  static const std::unordered_map<std::type_index, Score> all = {
      scorer_kernels<Expected>(), scorer_kernels<H2O>(),  scorer_kernels<KeyDiff>(),
      scorer_kernels<Knorm>(),    scorer_kernels<Rkv>(),  scorer_kernels<Rpc>(),
      scorer_kernels<SnapKV>(),   scorer_kernels<Tova>(), scorer_kernels<TriAttention>(),
  };
  static const bool own = (register_scorer<Cur>(), register_scorer<Given>(), register_scorer<RandomAttention>(),
                           register_scorer<RandomScorer>(), register_scorer<Recency>(), true);
  static_cast<void>(own);
  if (const auto found = all.find(typeid(scorer)); found != all.end()) return found->second;
  return row_scorers().find(typeid(scorer)) == nullptr ? nullptr : score_row_by_row;
}

}  // namespace kvkeep::cuda
