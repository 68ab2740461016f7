// SPDX-License-Identifier: Apache-2.0
// Scorers and what they build on: prepared queries, window attention, every scorer. `bytes`: keys as often as the
// method reads them.

#include "expected.h"
#include "gram.h"
#include "keydiff.h"
#include "kvkeep/score/calibration.h"
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
#include "prepare.h"
#include "rkv.h"
#include "row_body.h"
#include "rows.h"
#include "share.h"
#include "triattention.h"
#include "window_attention.h"

namespace kvkeep::cuda {
namespace {

/// Queries of a window of bf16 rings, before RoPE.
struct Rings {
  Rings(const Shape& shape, std::int32_t groups, std::int32_t window, std::int32_t length)
      : head(shape.dim * 2),
        token(head * shape.query_heads()),
        data(static_cast<std::size_t>(std::int64_t{groups} * window * token)),
        places(window) {
    fill_with_noise(data.data(), data.size() / 2);
    std::iota(places.begin(), places.end(), length - window);
    positions = std::make_unique<DeviceArray<std::int32_t>>(places);
    for (std::int32_t f = 0; f < shape.dim / 2; ++f) frequencies.push_back(std::pow(1e4, -2.0 * f / shape.dim));
    inv_freq = std::make_unique<DeviceArray<double>>(frequencies);
    std::vector<QueryView> all;
    for (std::int32_t g = 0; g < groups; ++g)
      all.push_back({.data = data.data() + g * window * token,
                     .token_stride = token,
                     .head_stride = head,
                     .positions = positions->data(),
                     .ring = window,
                     .count = window});
    windows = std::make_unique<DeviceArray<QueryView>>(all);
    ropes = std::make_unique<DeviceArray<RopeView>>(std::vector<RopeView>(
        static_cast<std::size_t>(groups), RopeView{.inv_freq = inv_freq->data(), .pairs = shape.dim / 2}));
  }
  std::int64_t head, token;
  DeviceArray<std::byte> data;
  std::vector<std::int32_t> places;
  std::vector<double> frequencies;
  std::unique_ptr<DeviceArray<std::int32_t>> positions;
  std::unique_ptr<DeviceArray<double>> inv_freq;
  std::unique_ptr<DeviceArray<QueryView>> windows;
  std::unique_ptr<DeviceArray<RopeView>> ropes;
};

void prepare(Result& result, Shape shape, Size size) {
  constexpr std::int32_t kWindow = 32;
  const std::int32_t groups = shape.layers * size.batch;
  const Rings rings(shape, groups, kWindow, size.length);
  const auto numbers = static_cast<std::size_t>(shape.query_heads()) * kWindow * static_cast<std::size_t>(shape.dim);
  const DeviceArray<float> turned(static_cast<std::size_t>(groups) * numbers);
  PrepareArguments a;
  a.evidence = {.queries = rings.windows->data(),
                .ropes = rings.ropes->data(),
                .count = groups * shape.kv_heads,
                .longest = size.length,
                .kv_heads = shape.kv_heads,
                .group = shape.group,
                .dim = shape.dim,
                .query = Element::bf16};
  a.window = kWindow;
  a.queries = turned.data();
  a.turn = true;
  launch_prepare(a, stream());
  RopeSpec rope;
  rope.inv_freq = rings.frequencies;
  std::vector<float> cosines(rings.frequencies.size()), sines(rings.frequencies.size()), want;
  std::vector<std::uint16_t> raw(numbers);
  copy_back(raw.data(), rings.data.data() + (groups - 1) * kWindow * rings.token, raw.size() * 2);
  for (std::int32_t h = 0; h < shape.query_heads(); ++h)
    for (std::int32_t i = 0; i < kWindow; ++i) {
      std::vector<float> q;
      for (std::int32_t d = 0; d < shape.dim; ++d)
        q.push_back(std::bit_cast<float>(
            static_cast<std::uint32_t>(raw[static_cast<std::size_t>((i * shape.query_heads() + h) * shape.dim + d)])
            << 16));
      rope_at(rope, rings.places[static_cast<std::size_t>(i)], cosines.data(), sines.data());
      rope_rotate(rope.style, shape.dim / 2, cosines.data(), sines.data(), q.data());
      want.insert(want.end(), q.begin(), q.end());
    }
  expect_close(result, "the turned query", turned.download(static_cast<std::size_t>(groups - 1) * numbers, numbers),
               want, 1e-5, 1e-5);
  measure(result, static_cast<double>(groups) * static_cast<double>(numbers) * 6, [&] { launch_prepare(a, stream()); });
}

/// Which queries attention reads: those of the rings after RoPE, or copies in f32, which need two numbers of bf16.
enum class Asking : std::uint8_t { filed, turned, given_sums };

/// Natural log-sum-exps of the queries of one (layer, sequence), [Hq, window].
std::vector<float> log_sums(const OnCpu& cpu, const Asked& asked) {
  const std::int32_t dim = asked.shape.dim, window = asked.window;
  std::vector<float> out;
  std::vector<double> keys(cpu.keys.size());
  for (std::size_t i = 0; i < keys.size(); ++i)
    keys[i] = std::bit_cast<float>(static_cast<std::uint32_t>(cpu.keys[i]) << 16);
  for (std::int32_t n = 0; n < asked.shape.query_heads() * window; ++n) {
    const float* q = cpu.queries.data() + std::int64_t{n} * dim;
    const double* row = keys.data() + std::int64_t{n / window / asked.shape.group} * asked.length * dim;
    double sum = 0;
    for (std::int32_t t = 0; t <= asked.length - window + n % window; ++t) {
      double logit = 0;
      for (std::int32_t d = 0; d < dim; ++d) logit += static_cast<double>(q[d]) * row[std::int64_t{t} * dim + d];
      sum += std::exp(logit * static_cast<double>(asked.evidence.scale));
    }
    out.push_back(static_cast<float>(std::log(sum)));
  }
  return out;
}

void time_attention(Result& result, Asked& asked, bool usage, Asking asking) {
  if (asking == Asking::turned) {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    std::vector<float> noise((std::size_t{1} << 18) + 3);
    for (float& x : noise) x = normal(random);
    asked.queries.fill(noise);
  }
  const DeviceArray<float> newest(static_cast<std::size_t>(asked.slots));
  WindowAttentionArguments a{.evidence = asked.evidence,
                             .windows = asked.windows->data(),
                             .window = asked.window,
                             .usage = usage ? asked.scores.data() : nullptr,
                             .newest = newest.data()};
  a.evidence.query = Element::bf16;
  if (asking == Asking::turned || !window_attention_reads_views(a.evidence, a.window)) a.queries = asked.queries.data();
  const auto sums_of_group = static_cast<std::size_t>(asked.shape.query_heads() * asked.window);
  const DeviceArray<float> sums(asking == Asking::given_sums ? sums_of_group * static_cast<std::size_t>(asked.groups())
                                                             : 1);
  if (asking == Asking::given_sums) {
    sums.fill({8.0F});  // of groups that are not looked at
    a.log_sum_exp = sums.data();
  }
  const DeviceArray<std::byte> workspace(
      static_cast<std::size_t>(window_attention_workspace_bytes(a.evidence, a.window)));
  a.workspace = workspace.data();
  for (const std::int32_t g : asked.sampled_groups()) {
    if (asking != Asking::given_sums) break;
    const std::vector<float> own = log_sums(OnCpu(asked, g), asked);
    copy_there(sums.data() + static_cast<std::size_t>(g) * sums_of_group, own.data(), own.size() * sizeof(float));
  }
  launch_window_attention(a, stream());
  for (const std::int32_t g : asked.sampled_groups()) {
    const OnCpu cpu(asked, g);
    const WindowAttention want = cpu.attention(asked.window, {.usage = usage, .newest = true});
    if (usage) expect_close(result, "usage", asked.of_group(asked.scores, g), cpu.flat(want.usage), 1e-7, 1e-3);
    expect_close(result, "the newest query's attention", asked.of_group(newest, g), cpu.flat(want.newest), 1e-7, 1e-3);
  }
  const int passes = asking == Asking::given_sums ? 1 : 2;
  result.set("flop",
             2.0 * passes * static_cast<double>(asked.slots) * asked.shape.group * asked.window * asked.shape.dim);
  measure(result, passes * static_cast<double>(asked.key_bytes), [&] { launch_window_attention(a, stream()); });
}

template <Asking kAsking>
void window_attention_of_32(Result& result, Shape shape, Size size) {
  Asked asked(shape, size, 32);
  time_attention(result, asked, true, kAsking);
}
/// As TOVA alone needs it: no matrix units.
void attention_of_the_newest(Result& result, Shape shape, Size size) {
  Asked asked(shape, size, 1);
  time_attention(result, asked, false, Asking::filed);
}

/// Compares the scores of a sample with those of a CPU scorer. values: the keys stand for them.
void expect_as_on_cpu(Result& result, const Asked& asked, const Scorer& scorer, double absolute, double relative,
                      bool values = false) {
  for (const std::int32_t g : asked.sampled_groups()) {
    OnCpu cpu(asked, g);
    if (values) cpu.let_keys_be_values();
    Scores want = scorer.score(cpu.evidence, cpu.limits, {});
    if (scorer.sharing() == Sharing::layer) {
      const Needs needs = scorer.needs();
      const Flat flat;
      want = host()
                 .begin(cpu.evidence, cpu.limits, Demand{"", needs, scorer, flat, Sharing::layer})
                 ->share(want, Sharing::layer);
    }
    expect_close(result, text("the score by ", scorer.name()), asked.of_group(asked.scores, g), cpu.flat(want.data),
                 absolute, relative);
  }
}

/// What a window scorer reads, into `out`.
void read_window(const Asked& asked, const WindowReading& reading, float* out,
                 const DeviceArray<std::byte>& workspace) {
  using Kind = WindowReading::Kind;
  if (reading.kind == Kind::history)
    return launch_history_attention({.evidence = asked.evidence,
                                     .windows = asked.windows->data(),
                                     .queries = asked.queries.data(),
                                     .reading = reading,
                                     .out = out,
                                     .workspace = workspace.data()},
                                    stream());
  launch_window_attention({.evidence = asked.evidence,
                           .windows = asked.windows->data(),
                           .window = reading.window,
                           .queries = asked.queries.data(),
                           .usage = reading.kind == Kind::usage ? out : nullptr,
                           .newest = reading.kind == Kind::newest ? out : nullptr,
                           .sum = reading.kind == Kind::sum ? out : nullptr,
                           .workspace = workspace.data()},
                          stream());
}

/// A window scorer from its queries to its scores, or, of what the policy reads anyway, the scorer alone. passes: how
/// often the keys are read.
template <class S>
void time_window_scorer(Result& result, Shape shape, Size size, const S& scorer, int passes) {
  const WindowReading reading = scorer.options().reading();
  const bool in_place = BodyTraits<typename S::Options>::kInPlace, values = scorer.needs().values,
             alone = reading.kind == WindowReading::Kind::newest || reading.kind == WindowReading::Kind::usage;
  Asked asked(shape, size, reading.window);
  if (values) asked.let_keys_be_values();
  const DeviceArray<float> attention(
      in_place && scorer.sharing() == Sharing::per_layer_per_head ? 0 : static_cast<std::size_t>(asked.slots));
  const DeviceArray<std::byte> workspace(
      static_cast<std::size_t>(std::max(history_attention_workspace_bytes(asked.evidence, reading),
                                        window_attention_workspace_bytes(asked.evidence, reading.window))));
  const DeviceArray<std::int32_t> next(
      std::vector<std::int32_t>(static_cast<std::size_t>(asked.groups()), size.length));
  float* const read = attention.size() == 0 ? asked.scores.data() : attention.data();
  const RowBodyArguments<typename S::Options> a{{.evidence = asked.evidence,
                                                 .values = Element::bf16,
                                                 .value_dim = shape.dim,
                                                 .next_positions = next.data(),
                                                 .windows = asked.windows->data(),
                                                 .attention = read,
                                                 .sum = reading.kind == WindowReading::Kind::sum,
                                                 .scores = in_place ? read : asked.scores.data()},
                                                scorer.options()};
  const auto finish = [&] {
    if (!BodyTraits<typename S::Options>::kAsRead) launch_row_body(a, stream());
    if (scorer.sharing() == Sharing::layer)
      launch_share({.rows = asked.evidence.rows,
                    .limits = asked.evidence.limits,
                    .sharing = {Sharing::layer, shape.layers, size.batch, shape.kv_heads},
                    .longest = size.length,
                    .scores = read,
                    .shared = asked.scores.data()},
                   stream());
  };
  const auto run = [&] {
    read_window(asked, reading, read, workspace);
    finish();
  };
  run();
  expect_as_on_cpu(result, asked, scorer, 1e-7 * asked.window, 1e-3, values);
  if (alone) return measure(result, static_cast<double>(asked.slots) * 8, finish);
  measure(result, passes * static_cast<double>(asked.key_bytes), run);
}

void tova(Result& result, Shape shape, Size size) { time_window_scorer(result, shape, size, Tova(), 0); }
void snapkv(Result& result, Shape shape, Size size) {
  time_window_scorer(result, shape, size, SnapKV({.window = 32}), 0);
}
void rpc(Result& result, Shape shape, Size size) { time_window_scorer(result, shape, size, Rpc(), 2); }
void h2o(Result& result, Shape shape, Size size) {  // one interval's tokens
  time_window_scorer(result, shape, size, H2O({size.length - size.budget}), 2);
}
void defensive(Result& result, Shape shape, Size size) { time_window_scorer(result, shape, size, Defensive(), 2); }
void vase(Result& result, Shape shape, Size size) { time_window_scorer(result, shape, size, Vase({.window = 32}), 3); }

void keydiff(Result& result, Shape shape, Size size) {
  const Asked asked(shape, size, 1);
  KeyDiffArguments a{.evidence = asked.evidence, .scores = asked.scores.data()};
  const DeviceArray<std::byte> workspace(static_cast<std::size_t>(keydiff_workspace_bytes(a.evidence)));
  a.workspace = workspace.data();
  launch_keydiff(a, stream());
  expect_as_on_cpu(result, asked, KeyDiff(), 1e-5, 0);
  measure(result, 2.0 * static_cast<double>(asked.key_bytes), [&] { launch_keydiff(a, stream()); });
}

void knorm(Result& result, Shape shape, Size size) {
  const Asked asked(shape, size, 1);
  const RowBodyArguments<KnormOptions> a{{.evidence = asked.evidence, .scores = asked.scores.data()}, {}};
  launch_row_body(a, stream());
  expect_as_on_cpu(result, asked, Knorm(), 0, 1e-5);
  measure(result, static_cast<double>(asked.key_bytes), [&] { launch_row_body(a, stream()); });
}

void triattention(Result& result, Shape shape, Size size) {
  const Asked asked(shape, size, 1);
  const std::int32_t pairs = shape.dim / 2;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  Calibration calibration;
  calibration.head_dim = shape.dim;
  std::vector<float> mean, modulus;
  for (std::int32_t l = 0; l < shape.layers; ++l)
    for (std::int32_t h = 0; h < shape.query_heads(); ++h) {
      Calibration::Head& head = calibration.heads[{l, h}];
      for (std::int32_t f = 0; f < pairs; ++f) {
        head.q_mean.emplace_back(normal(random), normal(random));
        head.q_abs_mean.push_back(std::abs(head.q_mean.back()) + 0.5F);
        mean.push_back(head.q_mean.back().real()), mean.push_back(head.q_mean.back().imag());
        modulus.push_back(head.q_abs_mean.back());
      }
    }
  std::vector<double> frequencies;
  for (std::int32_t f = 0; f < pairs; ++f) frequencies.push_back(std::pow(1e4, -2.0 * f / shape.dim));
  const DeviceArray<float> means(mean), moduli(modulus);
  const DeviceArray<double> inv_freq(frequencies);
  const DeviceArray<std::int32_t> next(
      std::vector<std::int32_t>(static_cast<std::size_t>(asked.groups()), size.length));
  TriAttentionArguments a{.evidence = asked.evidence,
                          .next_positions = next.data(),
                          .q_mean = means.data(),
                          .q_abs_mean = moduli.data(),
                          .slots = asked.slots,
                          .scores = asked.scores.data()};
  const DeviceArray<RopeView> ropes(
      std::vector<RopeView>(static_cast<std::size_t>(asked.groups()), {.inv_freq = inv_freq.data(), .pairs = pairs}));
  a.evidence.ropes = ropes.data();
  const DeviceArray<std::byte> workspace(static_cast<std::size_t>(triattention_workspace_bytes(a)));
  a.workspace = workspace.data();
  launch_triattention(a, stream());
  const TriAttention on_cpu(calibration);
  for (const std::int32_t g : asked.sampled_groups()) {
    OnCpu cpu(asked, g);
    cpu.spec.rope.inv_freq = frequencies;
    WindowAttention unused;
    expect_close(result, "the score by triattention", asked.of_group(asked.scores, g),
                 cpu.flat(on_cpu.score(cpu.evidence, cpu.limits, unused).data), 1e-3, 1e-3);
  }
  measure(result, static_cast<double>(asked.key_bytes), [&] { launch_triattention(a, stream()); });
}

void recency(Result& result, Shape shape, Size size) {
  const Asked asked(shape, size, 1);
  const RowBodyArguments<RecencyOptions> a{{.evidence = asked.evidence, .scores = asked.scores.data()}, {}};
  launch_row_body(a, stream());
  const std::vector<float> got = asked.scores.download();
  for (std::size_t i = 0; i < got.size(); ++i)
    if (got[i] != static_cast<float>(i % static_cast<std::size_t>(size.length)))
      return result.fail("a slot's score is not its number");
  measure(result, static_cast<double>(asked.slots) * 4, [&] { launch_row_body(a, stream()); });
}

void random(Result& result, Shape shape, Size size) {
  const Asked asked(shape, size, 1);
  const RowBodyArguments<RandomOptions> a{{.evidence = asked.evidence, .scores = asked.scores.data()}, {.seed = 7}};
  launch_row_body(a, stream());
  for (const std::int32_t r : sample_of(asked.count)) {
    const Row& row = asked.host_rows[static_cast<std::size_t>(r)];
    const std::vector<float> got =
        asked.scores.download(static_cast<std::size_t>(row.first), static_cast<std::size_t>(size.length));
    for (std::int32_t t = 0; t < size.length; ++t)
      if (got[static_cast<std::size_t>(t)] != draw(draws_of_row(7, row.layer, row.head), t))
        return result.fail("a draw is not the CPU's");
  }
  measure(result, static_cast<double>(asked.slots) * 8, [&] { launch_row_body(a, stream()); });
}

/// The keys stand for the values as well.
void cur(Result& result, Shape shape, Size size) {
  Asked asked(shape, size, 1);
  asked.let_keys_be_values();
  const RowBodyArguments<CurOptions> a{
      {.evidence = asked.evidence, .values = Element::bf16, .value_dim = shape.dim, .scores = asked.scores.data()}, {}};
  launch_row_body(a, stream());
  expect_as_on_cpu(result, asked, Cur(), 0, 0, true);
  measure(result, 2.0 * static_cast<double>(asked.key_bytes), [&] { launch_row_body(a, stream()); });
}

void given(Result& result, Shape shape, Size size) {
  Asked asked(shape, size, 1);
  std::vector<float> drawn(static_cast<std::size_t>(asked.slots));
  for (std::size_t i = 0; i < drawn.size(); ++i) drawn[i] = static_cast<float>(i % 4093) - 2000;
  const DeviceArray<float> column(drawn);
  for (Row& row : asked.host_rows) row.given = column.data() + row.first, row.given_length = row.length;
  asked.rows = std::make_unique<DeviceArray<Row>>(asked.host_rows);
  asked.evidence.rows = asked.rows->data();
  const RowBodyArguments<GivenOptions> a{{.evidence = asked.evidence, .scores = asked.scores.data()}, {}};
  launch_row_body(a, stream());
  if (asked.scores.download() != drawn) return result.fail("a score is not the one that was given");
  measure(result, static_cast<double>(asked.slots) * 8, [&] { launch_row_body(a, stream()); });
}

/// `bytes`: the keys as often as they are read if every key finds a partner at once.
void time_rkv(Result& result, const Asked& asked) {
  RkvArguments a{.evidence = asked.evidence,
                 .windows = asked.windows->data(),
                 .queries = asked.queries.data(),
                 .options = {.lambda = 0, .redundancy = RkvOptions::Redundancy::history},
                 .slots = asked.slots,
                 .scores = asked.scores.data()};
  const DeviceArray<std::byte> workspace(static_cast<std::size_t>(rkv_workspace_bytes(a)));
  a.workspace = workspace.data();
  launch_rkv(a, stream());
  if (std::abs(asked.sum_of_row(asked.count - 1) + 1) > 1e-3) return result.fail("redundancies do not add up to 1");
  a.options = {};
  measure(result, 5.0 * static_cast<double>(asked.key_bytes), [&] { launch_rkv(a, stream()); });
}

void rkv(Result& result, Shape shape, Size size) { time_rkv(result, Asked(shape, size, 8)); }
/// The worst case: no key resembles any.
void rkv_far(Result& result, Shape shape, Size size) { time_rkv(result, Asked(shape, size, 8, false)); }

/// Expected Attention on a window of queries before RoPE. multiplies: cuBLAS, or null for the kernel.
void time_expected(Result& result, const Shape& shape, const Size& size, std::int32_t window, Blas* multiplies) {
  const RandomEvent event(shape, size);
  fill_with_noise(event.cache.data(), event.cache.size() / 2);
  const auto groups = static_cast<std::int32_t>(event.count / shape.kv_heads);
  const Rings rings(shape, groups, window, size.length);
  const DeviceArray<std::int32_t> next(std::vector<std::int32_t>(static_cast<std::size_t>(groups), size.length));
  const auto slots = static_cast<std::size_t>(event.count * event.length);
  const DeviceArray<float> scores(slots);
  ExpectedArguments a;
  a.evidence = {.rows = event.rows->data(),
                .limits = event.limits->data(),
                .queries = rings.windows->data(),
                .ropes = rings.ropes->data(),
                .count = static_cast<std::int32_t>(event.count),
                .longest = size.length,
                .kv_heads = shape.kv_heads,
                .group = shape.group,
                .dim = shape.dim,
                .keys = Element::bf16,
                .query = Element::bf16,
                .scale = 1.0F / std::sqrt(static_cast<float>(shape.dim))};
  a.value_dim = shape.dim;
  a.values = Element::bf16;
  a.next_positions = next.data();
  a.queries = window;
  a.slots = static_cast<std::int64_t>(slots);
  a.scores = scores.data();
  a.gram_queries = 1;
  a.blas = multiplies;
  const DeviceArray<std::byte> workspace(static_cast<std::size_t>(expected_workspace_bytes(a)));
  a.workspace = workspace.data();
  const auto of_row = [&](std::int32_t r) {
    return scores.download(static_cast<std::size_t>(r * event.length), static_cast<std::size_t>(event.length));
  };
  std::vector<std::vector<float>> of_kernel;
  if (multiplies != nullptr) {
    a.blas = nullptr;
    launch_expected(a, stream());
    for (const std::int32_t r : sample_of(a.evidence.count)) of_kernel.push_back(of_row(r));
    a.blas = multiplies;
  }
  launch_expected(a, stream());
  for (const std::int32_t r : sample_of(a.evidence.count)) {
    const std::vector<float> got = of_row(r);
    for (std::size_t t = 0; t < got.size() && multiplies != nullptr; ++t)
      if (const float want = of_kernel.front()[t]; !(std::abs(got[t] - want) <= 1e-3F * std::abs(want)))
        return result.fail(text("the score of slot ", t, " is ", got[t], " with cuBLAS, ", want, " with the kernel"));
    if (multiplies != nullptr) of_kernel.erase(of_kernel.begin());
    if (!(got[0] == *std::max_element(got.begin(), got.end())) || !std::isfinite(got.back()))
      return result.fail("a sink does not have the largest score, or a score is not finite");
  }
  measure(result, static_cast<double>(slots) * shape.dim * 4, [&] { launch_expected(a, stream()); });
}

void expected(Result& result, Shape shape, Size size) {
  time_expected(result, shape, size, options().toy ? 64 : 256, nullptr);
}
/// The same on a window of `budget` queries, whoever multiplies them: where one overtakes the other is what
/// tuning::kGramQueries should be.
void expected_window(Result& result, Shape shape, Size size) {
  time_expected(result, shape, size, size.budget, nullptr);
}
void expected_window_blas(Result& result, Shape shape, Size size) {
  const DeviceArray<std::byte> workspace(static_cast<std::size_t>(Blas::kWorkspace));
  Blas blas;
  blas.open(workspace.data());
  time_expected(result, shape, size, size.budget, &blas);
  synchronize(stream());
}

}  // namespace

void add_scorers() {
  add("Prepare", prepare, {{1, 1536, 1024}, {32, 1536, 1024}});
  add("WindowAttention", window_attention_of_32<Asking::filed>, {{1, 1536, 1024}, {32, 1536, 1024}, {1, 32768, 2048}});
  add("WindowAttentionPreRope", window_attention_of_32<Asking::turned>, {{1, 1536, 1024}, {32, 1536, 1024}});
  add("WindowAttentionGivenSums", window_attention_of_32<Asking::given_sums>, {{1, 1536, 1024}, {32, 1536, 1024}});
  add("NewestAttention", attention_of_the_newest, {{1, 1536, 1024}, {32, 1536, 1024}});
  add("Tova", tova, {{1, 1536, 1024}, {32, 1536, 1024}});
  add("KeyDiff", keydiff, {{1, 1536, 1024}, {32, 1536, 1024}, {1, 32768, 2048}});
  add("Knorm", knorm, {{1, 1536, 1024}, {32, 1536, 1024}, {1, 32768, 2048}});
  add("SnapKV", snapkv, {{1, 1536, 1024}, {32, 1536, 1024}});
  add("TriAttention", triattention, {{1, 1536, 1024}, {32, 1536, 1024}});
  add("Recency", recency, {{1, 1536, 1024}, {32, 1536, 1024}});
  add("Random", random, {{1, 1536, 1024}, {32, 1536, 1024}});
  add("Cur", cur, {{1, 1536, 1024}, {32, 1536, 1024}});
  add("Given", given, {{1, 1536, 1024}, {32, 1536, 1024}});
  add("Rpc", rpc, {{1, 1536, 1024}, {32, 1536, 1024}, {1, 32768, 2048}});
  add("H2O", h2o, {{1, 1536, 1024}, {32, 1536, 1024}});
  add("Defensive", defensive, {{1, 1536, 1024}, {32, 1536, 1024}, {1, 32768, 2048}});
  add("Vase", vase, {{1, 1536, 1024}, {32, 1536, 1024}, {1, 32768, 2048}});
  add("Rkv", rkv, {{1, 1536, 1024}, {32, 1536, 1024}, {1, 32768, 2048}});
  add("RkvFar", rkv_far, {{1, 1536, 1024}, {32, 1536, 1024}, {1, 32768, 2048}});
  add("Expected", expected, {{1, 1536, 1024}, {8, 1536, 1024}, {1, 32768, 2048}}, {{1, 96, 64}});
  const auto windows = {Size{1, 1536, 160}, Size{1, 1536, 256},  Size{1, 1536, 384},
                        Size{1, 1536, 512}, Size{1, 1536, 1024}, Size{8, 1536, 512}};
  const auto toy_windows = {Size{1, 200, 150}, Size{1, 400, 300}};
  add("ExpectedWindow", expected_window, windows, toy_windows);
  if (Blas::why_not().empty()) add("ExpectedWindowBlas", expected_window_blas, windows, toy_windows);
}

}  // namespace kvkeep::cuda
