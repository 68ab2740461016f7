// SPDX-License-Identifier: Apache-2.0
// The line on a device: a keeper whose cache, columns and queries lie there keeps what a keeper on the CPU keeps, slot
// for slot, dense and in pages.

#include "engines.h"

#include <array>
#include <map>
#include <memory>
#include <tuple>

#include "device.h"
#include "fresh_accelerator.h"
#include "kvkeep/parts/pins.h"
#include "kvkeep/policy/across_ranks.h"
#include "kvkeep/score/calibration.h"
#include "kvkeep/score/triattention.h"
#include "near_ties.h"
#include "policy/strided.h"
#include "policy/tapering.h"

namespace kvkeep::cuda::keeper_test {
namespace {

using testing::Array;
using namespace engines;

struct Case {
  const char* name;
  const char* policy;
  bool ragged = false;
};
void PrintTo(const Case& one, std::ostream* out) { *out << one.name; }

class DeviceKeeper : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (!has_machine()) GTEST_SKIP() << "no GPU here";
  }
};

void expect_alike_reports(const Report& a, const Report& b, bool pinned = false) {
  ASSERT_EQ(a.cuts.size(), b.cuts.size());
  for (std::size_t i = 0; i < a.cuts.size(); ++i) {
    EXPECT_EQ(a.cuts[i].sequence, b.cuts[i].sequence);
    EXPECT_EQ(a.cuts[i].logical_length, b.cuts[i].logical_length);
    EXPECT_EQ(a.cuts[i].length_before, b.cuts[i].length_before);
    EXPECT_EQ(a.cuts[i].length_after, b.cuts[i].length_after);
    EXPECT_EQ(a.cuts[i].slots_after, b.cuts[i].slots_after);
    EXPECT_GE(a.cuts[i].slots_chosen, b.cuts[i].slots_chosen) << "on a device a lower bound if some are pinned";
    if (!pinned) EXPECT_EQ(a.cuts[i].slots_chosen, b.cuts[i].slots_chosen);
  }
  EXPECT_EQ(a.slots_dropped, b.slots_dropped);
  EXPECT_EQ(a.bytes_before, b.bytes_before);
  EXPECT_EQ(a.bytes_after, b.bytes_after);
  EXPECT_LE(a.bytes_moved, b.bytes_moved) << "what the host can say on a device is an upper bound";
}

void expect_alike_credit(const Engine& a, const Engine& b) {
  for (const auto& [id, lengths] : a.lengths)
    for (std::int32_t r = 0; r < kRows; ++r) {
      const auto x = a.keeper.credit(id, r / kHeads, r % kHeads), y = b.keeper.credit(id, r / kHeads, r % kHeads);
      ASSERT_EQ(x.size(), y.size());
      for (std::size_t t = 0; t < x.size(); ++t)
        ASSERT_NEAR(x[t], y[t], 1e-6 + 1e-4 * std::abs(x[t]))
            << "sequence " << id << ", row " << r << ", slot " << t << " of " << x.size();
    }
}

#if defined(KVKEEP_CUDA_MODEL)
constexpr float kNearTie = 0;  // the model's exponentials are the CPU's
#else
constexpr float kNearTie = 1e-5F;  // of the larger score: a GPU's exponentials are off by some units in the last place
#endif

/// The same engine on the CPU and on a device.
struct Both {
  std::unique_ptr<Engine> cpu, device;

  [[nodiscard]] std::array<Engine*, 2> engines() const { return {cpu.get(), device.get()}; }

  /// Scores of the slots that compete in the next event on the CPU, by sequence, row and position.
  using Scores = std::map<std::tuple<SequenceId, std::int32_t, std::int32_t>, float>;
  [[nodiscard]] Scores scores(const std::vector<SequenceId>& ids) const {
    Scores all;
    const Plan plan = cpu->plan(ids);
    if (!plan.decision.keep || !plan.decision.scores.data.defined()) return all;
    for (const Row& row : plan.table.rows)
      for (std::int32_t t = 0; t < row.length; ++t)
        all[{ids[static_cast<std::size_t>(row.sequence)], row.layer * kHeads + row.head, row.positions[t]}] =
            plan.decision.scores.data.data<float>()[row.first + t];
    return all;
  }

  /// True if both hold the same slots; else, that a step went by in which they differ by near ties alone.
  [[nodiscard]] bool alike(const std::vector<SequenceId>& ids, const Scores& before) const {
    bool same = true;
    for (const SequenceId id : ids)
      for (std::int32_t l = 0; l < kLayers; ++l) {
        std::array<std::vector<testing::ScoredSlot>, 2> held;  // of all heads, which may compete
        for (std::size_t e = 0; e < 2; ++e)
          for (std::int32_t r = l * kHeads; r < (l + 1) * kHeads; ++r)
            for (const std::int32_t position : engines()[e]->keeper.positions(id, l, r % kHeads)) {
              const auto found = before.find({id, r, position});
              held[e].push_back({r, position, found == before.end() ? 0.0F : found->second});
            }
        if (held[0] == held[1]) continue;
        same = false;
        EXPECT_TRUE(testing::differ_by_near_ties(held[0], held[1], kNearTie)) << "sequence " << id << ", layer " << l;
      }
    return same;
  }
};

/// Prompts in chunks, forks, decoding by ones and more, tokens taken back, sequences that end: the same to both.
/// Returns false if both met a near tie and took different sides.
bool run_once(const Both& both, std::uint64_t seed, bool pinned) {
  oracle::Random random(seed);
  std::int64_t events = 0;
  bool alike = true;
  const auto step = [&](const std::vector<std::pair<SequenceId, std::int32_t>>& work) {
    const Numbers numbers = numbers_of(random, work);
    for (Engine* engine : both.engines()) engine->feed(numbers);
    const Both::Scores before = kNearTie > 0 ? both.scores(numbers.ids) : Both::Scores();
    const Report a = both.cpu->cut(numbers.ids), b = both.device->cut(numbers.ids);
    alike = kNearTie == 0 || both.alike(numbers.ids, before);
    if (!alike) return;
    ASSERT_NO_FATAL_FAILURE(expect_alike_reports(a, b, pinned));
    events += static_cast<std::int64_t>(b.cuts.size());
  };
  for (Engine* engine : both.engines()) {
    engine->join(1);
    engine->join(2);
    if (!pinned) continue;
    engine->keeper.part<parts::Pins>().pin(1, 3, 9);
    engine->keeper.part<parts::Pins>().pin(2, 30, 41);
    engine->keeper.part<parts::Pins>().pin(2, 88, 93);  // the last two of the prompt, and three to come
  }
  step({{1, 45}, {2, 90}});
  if (!alike) return false;
  for (Engine* engine : both.engines()) engine->fork(3, 1, 37);
  step({{3, 20}, {1, 1}});
  for (int n = 0; n < 24 && alike && !::testing::Test::HasFatalFailure(); ++n) {
    step(n % 3 == 0 ? std::vector<std::pair<SequenceId, std::int32_t>>{{2, 3}, {3, 1}}
                    : std::vector<std::pair<SequenceId, std::int32_t>>{{1, 2}, {2, 1}, {3, 2}});
    if (pinned && n == 10)
      for (Engine* engine : both.engines()) {
        engine->keeper.part<parts::Pins>().unpin(2, 33, 38);
        engine->keeper.part<parts::Pins>().pin(3, engine->keeper.logical_length(3) - 2,
                                               engine->keeper.logical_length(3) + 4);
      }
    if (n % 8 == 0 && alike) expect_alike(*both.cpu, *both.device);
  }
  if (!alike || ::testing::Test::HasFatalFailure()) return alike;
  expect_alike(*both.cpu, *both.device);
  expect_alike_credit(*both.cpu, *both.device);
  EXPECT_GE(events, 2);
  return true;
}

/// Slot for slot. On hardware a near tie ends a run, which then begins again with other numbers: three in a row are too
/// many.
template <class Make>
Both run_both(const Make& make, std::uint64_t seed, bool pinned = false) {
  for (int attempt = 0; attempt < 3; ++attempt) {
    Both both = make();
    if (run_once(both, seed + 100 * static_cast<std::uint64_t>(attempt), pinned)) return both;
  }
  ADD_FAILURE() << "three runs met near ties";
  return make();
}

/// Both with a dense cache.
auto dense(const std::string& policy, bool ragged, Dtype dtype = Dtype::f32) {
  return [=] {
    return Both{std::make_unique<DenseEngine>(policy, ragged, dtype),
                std::make_unique<DenseEngine>(policy, ragged, dtype, fresh_accelerator())};
  };
}

TEST(NearTies, AreSlotsWhoseScoresDifferAsLittleAsSaid) {
  using Slots = std::vector<testing::ScoredSlot>;
  const auto near = [](const Slots& a, const Slots& b) { return testing::differ_by_near_ties(a, b, 1e-5F); };
  const testing::ScoredSlot best{0, 1, 9}, good{0, 2, 1}, close{0, 3, 1.000005F}, far{0, 4, 1.001F}, other{1, 2, 1},
      none{0, 5, std::nanf("")}, nothing{0, 6, std::nanf("")};
  EXPECT_TRUE(near({best, good}, {best, good}));
  EXPECT_TRUE(near({best, good}, {close, best}));
  EXPECT_TRUE(near({best, good}, {best, other})) << "of another head";
  EXPECT_FALSE(near({best, good}, {best, far}));
  EXPECT_FALSE(near({best, good}, {good, close})) << "the best is gone";
  EXPECT_FALSE(near({best, good}, {best})) << "fewer";
  EXPECT_TRUE(near({best, none}, {best, nothing}));
  EXPECT_FALSE(near({best, none}, {best, good}));
}

TEST_P(DeviceKeeper, KeepsInADenseCacheWhatTheCpuKeeps) {
  const auto [name, policy, ragged] = GetParam();
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    static_cast<void>(run_both(dense(policy, ragged, dtype), 11));
    if (HasFailure()) return;
  }
  static_cast<void>(run_both(
      [&, policy = policy, ragged = ragged] {
        return Both{std::make_unique<DenseEngine>(policy, ragged, Dtype::f32, nullptr, Form::latent),
                    std::make_unique<DenseEngine>(policy, ragged, Dtype::f32, fresh_accelerator(), Form::latent)};
      },
      11));
}

TEST_P(DeviceKeeper, KeepsInPagesWhatTheCpuKeepsInADenseCache) {  // B21, B23, B24
  const auto [name, policy, ragged] = GetParam();
  int which = 0;
  for (const std::int32_t page_size : {1, 16, 64, 32}) {
    const PageLayout layout = which % 2 == 0 ? PageLayout::slot_head : PageLayout::head_slot;
    const Form form = static_cast<Form>(which++ % kForms);
    SCOPED_TRACE(text(name, ", pages of ", page_size));
    const Both both = run_both(
        [&, policy = policy, ragged = ragged] {
          auto paged = std::make_unique<PagedEngine>(policy, ragged, Dtype::f32, page_size, layout, form, 1600,
                                                     fresh_accelerator());
          if (page_size == 16) paged->table_dtype = Dtype::i64;
          return Both{std::make_unique<DenseEngine>(policy, ragged, Dtype::f32, nullptr,
                                                    form == Form::latent ? form : Form::apart),
                      std::move(paged)};
        },
        12);
    if (HasFailure()) return;
    const auto& device = dynamic_cast<const PagedEngine&>(*both.device);
    std::int64_t holders = 0, held = 0;
    for (std::int32_t p = 0; p < device.pool.capacity(); ++p) holders += device.pool.references(p);
    for (const auto& [id, lengths] : device.lengths)
      held += (*std::max_element(lengths.begin(), lengths.end()) + page_size - 1) / page_size;
    EXPECT_EQ(holders, held) << "every page that is not needed has been given back";
  }
}

TEST_P(DeviceKeeper, KeepsPinnedSpansAsTheCpuDoes) {
  const auto [name, policy, ragged] = GetParam();
  if (std::string(policy).find("official") != std::string::npos) GTEST_SKIP() << "pins nothing";
  const Both both = run_both(dense(policy, ragged), 14, true);
  if (HasFailure()) return;
  for (const Engine* engine : both.engines())
    for (const SequenceId id : {1, 2, 3})
      for (const PositionSpan& span : engine->keeper.part<parts::Pins>().pinned(id))
        for (std::int32_t r = 0; r < kRows; ++r) {
          const auto held = engine->keeper.positions(id, r / kHeads, r % kHeads);
          for (std::int32_t p = span.begin; p < std::min<std::int64_t>(span.end, engine->keeper.logical_length(id));
               ++p)
            ASSERT_TRUE(std::ranges::binary_search(held, p))
                << "position " << p << ", row " << r << ", sequence " << id;
        }
}

TEST(DeviceKeeperOfAPolicyFromOutside, KeepsWhatTheCpuKeeps) {
  if (!has_machine()) GTEST_SKIP() << "no GPU here";
  register_policy(tapering());
  static_cast<void>(run_both(dense("tapering,budget=48,late=32,length=80,interval=12", false), 15));
}

TEST(DeviceKeeperOfAPolicyFromOutside, NamesAnAllocatorThatHasNoKernel) {
  if (!has_machine()) GTEST_SKIP() << "no GPU here";
  register_allocator<Strided>();
  try {
    const DenseEngine device("strided-tova,budget=48,interval=12", false, Dtype::f32, fresh_accelerator());
    FAIL() << "made";
  } catch (const InvalidArgument& refused) {
    EXPECT_NE(std::string(refused.what()).find("device: allocator strided has no kernel"), std::string::npos)
        << refused.what();
  }
}

INSTANTIATE_TEST_SUITE_P(
    Policies, DeviceKeeper,
    ::testing::Values(
        Case{"amstova", "ams-tova,budget=48,interval=12,recent=4,window=8,min_segment=2,max_segment=16"},
        Case{"amstovagroup",
             "ams-tova,budget=40,interval=8,recent=4,window=4,min_segment=2,max_segment=16,coverage=0.6,scorer.heads="
             "group"},
        Case{"amssnapkv",
             "ams-snapkv,budget=48,interval=12,recent=4,allocator.window=8,scorer.window=8,min_segment=2,max_segment="
             "16"},
        Case{"official",
             "ams-tova,variant=official,budget=48,interval=12,recent=4,window=8,min_segment=2,max_segment=16"},
        Case{"amskeydiff", "ams-keydiff,budget=48,interval=12,window=8"},
        Case{"amscur",
             "ams-cur,budget=48,interval=12,recent=4,allocator.window=8,min_segment=2,max_segment=16,protected_mass="
             "false"},
        Case{"tova", "tova,budget=48,interval=12,recent=4"}, Case{"keydiff", "keydiff,budget=48,interval=12"},
        Case{"knorm", "knorm,budget=48,interval=12,prefill=cut"},
        Case{"snapkv", "snapkv,budget=48,interval=12,window=8"},
        Case{"snapkvrkv", "snapkv,budget=48,interval=12,window=8,style=rkv"},
        Case{"officialtova", "tova,variant=official,budget=48,interval=12"},
        Case{"prompt", "tova,budget=64,interval=12,protect_prompt=true"},
        Case{"streaming", "streaming,budget=48,interval=12"},
        Case{"random", "ams-random,budget=48,interval=12,window=8,scorer.seed=3"},
        Case{"given", "given,budget=48,interval=12"},
        Case{"amsgiven", "ams-given,budget=48,interval=12,recent=4,window=8,min_segment=2,max_segment=16"},
        Case{"h2o", "h2o,budget=48,interval=12"}, Case{"rkv", "rkv,budget=48,interval=12"},
        Case{"rpc", "rpc,budget=60,interval=12,window=8"},
        Case{"defensive", "defensive,budget=48,interval=12,window=8"},
        Case{"amsdefensive", "ams-defensive,budget=48,interval=12,allocator.window=8,scorer.window=6,scorer.pool=3"},
        Case{"vase", "vase,budget=60,interval=12,recent=8,window=8,seed=5"},
        Case{"expected", "expected,budget=48,interval=12,queries=16"},
        Case{"amsexpected", "ams-expected,budget=48,interval=12,allocator.window=8,scorer.covariance=false"},
        Case{"chunkkv", "chunkkv-snapkv,budget=48,interval=12,window=8,chunk=5"},
        Case{"chunkkvown", "chunkkv-tova,budget=48,interval=12,chunk=7,allocator.heads=own"},
        Case{"criticalkv", "criticalkv-tova,budget=48,interval=12"},
        Case{"rpcofficial",
             "rpc,style=official,budget=48,sink=4,recent=8,protect_prompt=false,budget_counts=all,growth=0,trigger="
             "slack,interval=12,window=8,heads=all"},
        Case{"perhead", "tova,budget=48,interval=12,share=per_head"},
        Case{"union", "snapkv,budget=48,interval=12,window=8,share=union"},
        Case{"unionmean", "h2o,budget=48,interval=12,share=union_mean"},
        Case{"unionchunks", "chunkkv-tova,budget=48,interval=12,chunk=7,share=union"},
        Case{"pyramidkv", "pyramidkv-knorm,budget=48,interval=12,recent=4", true},
        Case{"adakv", "adakv-tova,budget=48,interval=12,recent=4", true},
        Case{"adakvsnapkv", "adakv-snapkv,budget=48,interval=12,window=8,allocator.safeguard=0.5", true},
        Case{"adakvtally", "adakv-h2o,budget=48,interval=12", true},
        Case{"adakvgiven", "adakv-given,budget=40,interval=6,recent=4,allocator.safeguard=0", true},
        Case{"criticaladakv", "criticalkv-tova,budget=48,interval=12,allocator.heads=adaptive", true},
        Case{"threshold", "threshold-given,threshold=0.3,budget=48,interval=12,recent=6", true},
        Case{"thresholdshared", "threshold-given,threshold=0.3,budget=48,interval=12,recent=6,share=union", true},
        Case{"thresholdtally", "threshold-h2o,threshold=0.004,budget=48,interval=12", true},
        Case{"thresholdprompt", "threshold-knorm,threshold=-2.5,budget=120,interval=12,protect_prompt=true", true}),
    [](const auto& p) { return std::string(p.param.name); });

using DeviceLine = OnDevice;

TEST_F(DeviceLine, RanksByACalibration) {
  const auto policy = [] {
    oracle::Random random(21);
    Calibration calibration;
    calibration.head_dim = kKeyDim;
    for (std::int32_t l = 0; l < kLayers; ++l)
      for (std::int32_t h = 0; h < 4; ++h) {
        Calibration::Head& head = calibration.heads[{l, h}];
        for (std::int32_t f = 0; f < kKeyDim / 2; ++f) {
          head.q_mean.emplace_back(static_cast<float>(random.normal()), static_cast<float>(random.normal()));
          head.q_abs_mean.push_back(std::abs(head.q_mean.back()) + static_cast<float>(random.unit()));
        }
      }
    Retention retention;
    retention.trigger.budget.slots = 48;
    retention.trigger.interval = 12;
    retention.recent = 4;
    return std::make_unique<Evict>("triattention", std::make_unique<TriAttention>(std::move(calibration)),
                                   std::make_unique<Flat>(), retention, "{}");
  };
  static_cast<void>(run_both(
      [&] {
        return Both{std::make_unique<DenseEngine>(policy(), false, Dtype::f32),
                    std::make_unique<DenseEngine>(policy(), false, Dtype::f32, fresh_accelerator())};
      },
      13));
}

TEST_F(DeviceLine, TakesTokensBack) {
  for (const char* policy : {"ams-tova,budget=48,interval=12,recent=4,window=8,min_segment=2,max_segment=16",
                             "expected,budget=48,interval=12"}) {
    DenseEngine cpu(policy, false, Dtype::f32), device(policy, false, Dtype::f32, fresh_accelerator());
    oracle::Random random(5);
    for (Engine* engine : {static_cast<Engine*>(&cpu), static_cast<Engine*>(&device)}) engine->join(1);
    for (int n = 0; n < 30; ++n) {
      const Numbers numbers = numbers_of(random, {{1, n == 0 ? 50 : 5}});
      for (Engine* engine : {static_cast<Engine*>(&cpu), static_cast<Engine*>(&device)}) {
        const bool cut = !engine->step(numbers).cuts.empty();
        if (cut || n % 2 == 0) continue;
        engine->keeper.truncate(1, engine->keeper.logical_length(1) - 3);
        for (std::int32_t& length : engine->lengths.at(1)) length -= 3;
      }
      ASSERT_NO_FATAL_FAILURE(expect_alike(cpu, device));
    }
    EXPECT_GT(device.keeper.totals().events, 3);
  }
}

// Those of the prompt's last queries are over four times as many slots as stay.
TEST_F(DeviceLine, ReadsNoLogSumExpThatIsOlderThanTheLastEvent) {
  for (const char* policy : {"ams-tova,budget=24,interval=3,prefill=cut,recent=4,window=8,min_segment=2,max_segment=16",
                             "snapkv,budget=24,interval=3,prefill=cut,recent=4,window=8"}) {
    DenseEngine cpu(policy, false, Dtype::f32), device(policy, false, Dtype::f32, fresh_accelerator());
    device.gives_log_sum_exp = true;
    oracle::Random random(5);
    for (Engine* engine : {static_cast<Engine*>(&cpu), static_cast<Engine*>(&device)}) engine->join(1);
    for (int n = 0; n < 20; ++n) {
      const Numbers numbers = numbers_of(random, {{1, n == 0 ? 100 : 1}});
      for (Engine* engine : {static_cast<Engine*>(&cpu), static_cast<Engine*>(&device)}) engine->step(numbers);
      ASSERT_NO_FATAL_FAILURE(expect_alike(cpu, device)) << policy << ", step " << n;
    }
    EXPECT_GE(cpu.keeper.totals().events, 5);
  }
}

TEST_F(DeviceLine, TakesGapsInPositions) {
  for (const char* policy : {"tova,budget=24,interval=6,recent=4", "expected,budget=24,interval=6,recent=4"}) {
    const auto run = [&](Engine& engine) {
      oracle::Random random(6);
      engine.join(1);
      std::int32_t position = 0;
      for (int n = 0; n < 20; ++n) {
        const std::int32_t tokens = n == 0 ? 20 : 2;
        Ints positions;
        for (std::int32_t i = 0; i < tokens; ++i) positions.push_back(position += 1 + (n + i) % 3);
        static_cast<void>(engine.step(numbers_of(random, {{1, tokens}}), positions));
      }
    };
    DenseEngine cpu(policy, false, Dtype::f32), device(policy, false, Dtype::f32, fresh_accelerator());
    run(cpu);
    run(device);
    expect_alike(cpu, device);
    EXPECT_GT(device.keeper.totals().events, 3);
  }
}

/// One of two ranks, before anything is gathered.
class FirstOfTwo final : public Collective {
 public:
  [[nodiscard]] std::int32_t rank() const override { return 0; }
  [[nodiscard]] std::int32_t size() const override { return 2; }
  void all_gather(std::span<const std::byte>, std::span<std::byte>) override { refuse<RankError>("alone"); }
};

TEST_F(DeviceLine, NamesOnRanksWhatHeadsDecideTogether) {
  const std::shared_ptr<Machine> machine = across_ranks(std::make_shared<FirstOfTwo>(), fresh_accelerator());
  const auto named = [&](const std::string& policy) {
    for (const std::string& problem :
         make_policy(policy + ",budget=48,interval=12")->problems_on(*machine, machine->part(engines::model())))
      if (problem.find("decides with the heads of other ranks") != std::string::npos) return true;
    return false;
  };
  for (const char* policy : {"tova", "rpc,heads=all", "adakv-snapkv", "keydiff,share=union",
                             "ams-keydiff,suffix_fill=max_global", "ams-keydiff,variant=official"})
    EXPECT_TRUE(named(policy)) << policy;
  for (const char* policy : {"tova,heads=group", "rpc", "ams-keydiff", "pyramidkv-knorm"})
    EXPECT_FALSE(named(policy)) << policy;
}

TEST_F(DeviceLine, NamesValuesThatAreTooLongForItsKernels) {
  ModelSpec wide = engines::model();
  wide.value_dim = 320;
  const auto named = [&](const char* policy) {
    for (const std::string& problem : make_policy(policy)->problems_on(*fresh_accelerator(), wide))
      if (problem.find("value_dim: ") == 0 && problem.find(" 320 numbers; allowed up to 256") != std::string::npos)
        return true;
    return false;
  };
  EXPECT_TRUE(named("expected,budget=48,interval=12"));
  EXPECT_TRUE(named("criticalkv-tova,budget=48,interval=12"));
  EXPECT_FALSE(named("expected,budget=48,interval=12,value_norm=false"));
  EXPECT_FALSE(named("tova,budget=48,interval=12"));
}

TEST_F(DeviceLine, RefusesADtypeWithoutAKernelAndChangesNothing) {
  const std::pair<Dtype, const char*> refused[] = {
      {Dtype::i16, "keys are i16; allowed f32, f16, bf16 and, with f32 scales, f8_e4m3, f8_e5m2, i8"},
      {Dtype::f8_e4m3, "keys of layer 0 are f8_e4m3 without f32 scales; allowed with one f32 scale per slot"},
      {Dtype::f8_e5m2, "keys of layer 0 are f8_e5m2 without f32 scales"},
      {Dtype::i8, "keys of layer 0 are i8 without f32 scales"}};
  for (const auto& [dtype, what] : refused) {
    DenseEngine engine("tova,budget=24,interval=8,recent=2", false, dtype, fresh_accelerator());
    oracle::Random random(11);
    engine.join(1);
    Numbers numbers = numbers_of(random, {{1, 40}});
    static_cast<void>(engine.step(numbers));  // the prompt is not cut
    engine.feed(numbers_of(random, {{1, 1}}));
    const Array before = Array(std::get<DenseKv>(engine.layers[0]).keys).clone();
    try {
      static_cast<void>(engine.cut({1}));
      FAIL() << dtype << " was scored";
    } catch (const Unsupported& error) {
      EXPECT_NE(std::string(error.what()).find(what), std::string::npos) << error.what();
    }
    EXPECT_TRUE(same_bits(Array(std::get<DenseKv>(engine.layers[0]).keys), before));
    EXPECT_EQ(engine.keeper.physical_length(1, 0, 0), 41);
    EXPECT_EQ(engine.keeper.totals().events, 0);
    DenseEngine moves("streaming,budget=24,interval=8,recent=2", false, dtype,
                      fresh_accelerator());  // what is not read only moves
    moves.join(1);
    static_cast<void>(moves.step(numbers));
    EXPECT_EQ(moves.step(numbers_of(random, {{1, 1}})).cuts.size(), 1U);
  }
}

void expect_memory_is_enough(const char* policy) {
  std::int64_t needed = 0;
  const auto run = [&](const std::shared_ptr<Machine>& accelerator) {
    DenseEngine engine(policy, true, Dtype::f32, accelerator);
    oracle::Random random(7);
    engine.join(1);
    for (int n = 0; n < 40; ++n) {
      engine.feed(numbers_of(random, {{1, n == 0 ? 50 : 1}}));
      needed = std::max(needed, engine.workspace_bytes({1}));
      static_cast<void>(engine.cut({1}));
    }
    EXPECT_GT(engine.keeper.totals().events, 2);
  };
  const std::shared_ptr<Machine> first = fresh_accelerator();
  run(first);
  ASSERT_GT(needed, 0);
  const std::int64_t bytes_needed = needed;
  const auto memory = [&](std::int64_t bytes) { return Array::empty({bytes + 256}, Dtype::u8, first->device()); };
  const auto aligned = [](const Array& m, std::int64_t bytes) {
    return m.narrow(0, (256 - reinterpret_cast<std::intptr_t>(m.bytes()) % 256) % 256, bytes);
  };
  const Array enough = memory(bytes_needed), little = memory(bytes_needed - 256);
  const std::shared_ptr<Machine> second = fresh_accelerator(), third = fresh_accelerator();
  second->use_workspace(aligned(enough, bytes_needed));
  run(second);
  third->use_workspace(aligned(little, bytes_needed - 256));
  try {
    run(third);
    FAIL() << "an event ran in less memory than it needs";
  } catch (const StateError& error) {
    EXPECT_NE(std::string(error.what()).find(text("needs ", bytes_needed)), std::string::npos) << error.what();
  }
  EXPECT_THROW(third->use_workspace(little.narrow(0, 0, 1).to(Dtype::f32)), InvalidArgument);
}

TEST_F(DeviceLine, WorksInTheMemoryItIsGivenAndSaysWhenThatIsTooLittle) {
  for (const char* policy : {"ams-tova,budget=48,interval=12,recent=4,window=8,min_segment=2,max_segment=16",
                             "adakv-tova,budget=48,interval=12", "threshold-knorm,threshold=-3,budget=48,interval=12",
                             "criticalkv-tova,budget=48,interval=12,allocator.heads=adaptive"})
    ASSERT_NO_FATAL_FAILURE(expect_memory_is_enough(policy)) << policy;
}

#if defined(KVKEEP_CUDA_MODEL)
TEST_F(DeviceLine, TakesAFewLaunchesForAnEventOfAllLayersAndSequences) {
  const auto launches_of = [](const char* policy) {
    DenseEngine engine(policy, true, Dtype::f32, fresh_accelerator());
    oracle::Random random(9);
    engine.join(1);
    engine.join(2);
    // Above every budget, so that both are cut at once.
    static_cast<void>(engine.step(numbers_of(random, {{1, 90}, {2, 100}})));
    for (;;) {
      const Numbers numbers = numbers_of(random, {{1, 1}, {2, 1}});
      const std::int64_t before = model::counters().launches;
      if (engine.step(numbers).cuts.size() == 2)
        return model::counters().launches - before -
               (engine.keeper.policy().needs().queries > 0 ? kLayers : 0);  // less one a layer for the new queries
    }
  };
  EXPECT_EQ(launches_of("ams-tova,budget=48,interval=12,window=8"), 6);
  EXPECT_EQ(launches_of("ams-tova,budget=48,interval=12,window=8,scorer.heads=group"), 5);
  EXPECT_EQ(launches_of("tova,budget=48,interval=12"), 6);
  for (const char* policy : {"snapkv,budget=72,interval=12", "rpc,budget=48,interval=12", "h2o,budget=48,interval=12",
                             "defensive,budget=48,interval=12", "vase,budget=72,interval=12"})
    EXPECT_EQ(launches_of(policy), 6) << policy;
  EXPECT_EQ(launches_of("knorm,budget=48,interval=12"), 4);
  EXPECT_EQ(launches_of("ams-knorm,budget=48,interval=12"), 6);
  EXPECT_EQ(launches_of("streaming,budget=48,interval=12"), 4);
  EXPECT_EQ(launches_of("expected,budget=48,interval=12"), 9);
  EXPECT_EQ(launches_of("adakv-tova,budget=48,interval=12"), 7) << "two more than with the plain selection";
  EXPECT_EQ(launches_of("threshold-knorm,threshold=-3,budget=48,interval=12"), 4);
  EXPECT_EQ(launches_of("criticalkv-tova,budget=48,interval=12,allocator.heads=adaptive"), 8);
}
#endif

TEST_F(DeviceLine, RefusesTensorsThatLieElsewhere) {
#if defined(KVKEEP_CUDA_MODEL)
  GTEST_SKIP() << "the model's device is the host";
#else
  DenseEngine engine("tova,budget=48,interval=12", false, Dtype::f32, fresh_accelerator());
  engine.join(1);
  oracle::Random random(8);
  const Numbers numbers = numbers_of(random, {{1, 3}});
  EXPECT_THROW(engine.keeper.observe(
                   {.layer = 0, .sequences = numbers.ids, .indptr = numbers.indptr, .queries = numbers.queries[0]}),
               InvalidArgument);
  DenseEngine host("tova,budget=48,interval=12", false, Dtype::f32);
  EXPECT_THROW(host.keeper.bind(engine.layers), InvalidArgument);
#endif
}

}  // namespace
}  // namespace kvkeep::cuda::keeper_test
