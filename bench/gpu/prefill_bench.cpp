// SPDX-License-Identifier: Apache-2.0
// The layer of a prefill that selects: scores of a prompt, ranks, variance over layers, the tokens that continue.

#include "last_query.h"
#include "layer_selector.h"
#include "narrow.h"
#include "prompt_scores.h"
#include "ranks.h"
#include "rows.h"

namespace kvkeep::cuda {
namespace {

/// True if the kept slots of every row ascend.
bool ascend(const std::vector<std::int32_t>& kept, std::int32_t budget) {
  for (std::size_t n = 1; n < kept.size(); ++n)
    if (n % static_cast<std::size_t>(budget) != 0 && kept[n] <= kept[n - 1]) return false;
  return true;
}

/// Prompts that are ranked, one after the other.
std::vector<RankedPrompt> side_by_side(std::int32_t batch, std::int32_t ranked, std::int32_t kept) {
  std::vector<RankedPrompt> prompts;
  for (std::int32_t p = 0; p < batch; ++p)
    prompts.push_back({.scores = std::int64_t{p} * ranked,
                       .ranks = std::int64_t{p} * ranked,
                       .stride = std::int64_t{batch} * ranked,
                       .kept = std::int64_t{p} * kept,
                       .ranked = ranked,
                       .state = p});
  return prompts;
}

/// A permutation of 1 to n for every prompt.
std::vector<std::int32_t> drawn_ranks(std::mt19937& random, std::int32_t batch, std::int32_t n) {
  std::vector<std::int32_t> ranks(static_cast<std::size_t>(batch) * static_cast<std::size_t>(n));
  for (auto begin = ranks.begin(); begin != ranks.end(); begin += n) {
    std::iota(begin, begin + n, 1);
    std::shuffle(begin, begin + n, random);
  }
  return ranks;
}

/// One layer of a prefill, as all below.
void prompt_scores(Result& result, Shape shape, Size size) {
  const auto [batch, length, budget, page] = size;
  shape.layers = 1;
  const Asked asked(shape, size, 32);
  const DeviceArray<float> tokens(static_cast<std::size_t>(batch) * static_cast<std::size_t>(length - 32));
  PromptScoresArguments a{.evidence = asked.evidence,
                          .queries = asked.queries.data(),
                          .pool = 1,
                          .slots = asked.slots,
                          .heads = asked.scores.data(),
                          .tokens = tokens.data()};
  const DeviceArray<std::byte> workspace(static_cast<std::size_t>(prompt_scores_workspace_bytes(a)));
  a.workspace = workspace.data();
  launch_prompt_scores(a, stream());
  const std::vector<float> got = tokens.download(), heads = asked.scores.download();
  const double sum = std::accumulate(got.begin(), got.end(), 0.0),
               of_heads = std::accumulate(heads.begin(), heads.end(), 0.0),
               most = 32.0 * batch * shape.kv_heads * shape.group;
  if (!(sum > 0.5 * most && sum <= 1.001 * most) || std::abs(sum - of_heads) > 1e-3 * sum)
    return result.fail("scores do not add up to 1 per query, most of it before the window");
  a.pool = 7;
  measure(result, 2.0 * static_cast<double>(asked.key_bytes), [&] { launch_prompt_scores(a, stream()); });
}

/// What the newest fifth of a prompt gives its other tokens, each query with a weight: PyramidInfer's layer.
void weighted_sums(Result& result, Shape shape, Size size) {
  const auto [batch, length, budget, page] = size;
  shape.layers = 1;
  const std::int32_t window = length / 5;
  const Asked asked(shape, size, window);
  const DeviceArray<float> sums(static_cast<std::size_t>(asked.slots)),
      weights(std::vector<float>(static_cast<std::size_t>(window), 2));
  PromptScoresArguments a{.evidence = asked.evidence,
                          .queries = asked.queries.data(),
                          .window = window,
                          .slots = asked.slots,
                          .sums = sums.data(),
                          .weights = weights.data()};
  const DeviceArray<std::byte> workspace(static_cast<std::size_t>(prompt_scores_workspace_bytes(a)));
  a.workspace = workspace.data();
  launch_prompt_scores(a, stream());
  const std::vector<float> got = sums.download();
  const double sum = std::accumulate(got.begin(), got.end(), 0.0), want = 2.0 * window * batch * shape.kv_heads;
  if (std::abs(sum - want) > 1e-3 * want) return result.fail("sums do not add up to the weights");
  measure(result, 2.0 * static_cast<double>(asked.key_bytes), [&] { launch_prompt_scores(a, stream()); });
}

/// One layer's products of the last query, GemFilter's.
void last_query(Result& result, Shape shape, Size size) {
  const auto [batch, length, budget, page] = size;
  shape.layers = 1;
  const Asked asked(shape, size, 1);
  const DeviceArray<float> tokens(static_cast<std::size_t>(batch) * static_cast<std::size_t>(length));
  LastQueryArguments a{.evidence = asked.evidence,
                       .queries = asked.queries.data(),
                       .pool = 1,
                       .slots = asked.slots,
                       .scores = tokens.data()};
  const DeviceArray<std::byte> workspace(static_cast<std::size_t>(last_query_workspace_bytes(a)));
  a.workspace = workspace.data();
  launch_last_query(a, stream());
  const std::vector<float> got = tokens.download(), queries = asked.queries.download();
  const auto dim = static_cast<std::size_t>(shape.dim);
  for (const std::int32_t token : sample_of(batch * length)) {
    double want = 0, size_of_terms = 0;
    for (std::int32_t h = 0; h < shape.kv_heads; ++h) {
      const std::int64_t row = std::int64_t{token / length} * shape.kv_heads + h;
      const std::vector<std::uint16_t> key =
          asked.keys.download(static_cast<std::size_t>(row * length + token % length) * dim, dim);
      for (std::size_t q = 0; q < static_cast<std::size_t>(shape.group); ++q)
        for (std::size_t d = 0; d < dim; ++d) {
          const double term =
              static_cast<double>(queries[(static_cast<std::size_t>(row * shape.group) + q) * dim + d]) *
              static_cast<double>(std::bit_cast<float>(std::uint32_t{key[d]} << 16));
          want += term;
          size_of_terms += std::abs(term);
        }
    }
    if (std::abs(static_cast<double>(got[static_cast<std::size_t>(token)]) - want) > 1e-5 * size_of_terms)
      return result.fail("a score is not that of a loop");
  }
  a.pool = 5;
  measure(result, static_cast<double>(asked.key_bytes), [&] { launch_last_query(a, stream()); });
}

/// `bytes`: every score read once, every rank written once.
void ranks(Result& result, Shape, Size size) {
  const auto [batch, length, budget, page] = size;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> drawn(static_cast<std::size_t>(batch) * static_cast<std::size_t>(length));
  for (float& x : drawn) x = std::exp(normal(random));
  const DeviceArray<float> scores(drawn);
  const DeviceArray<std::int32_t> ranks(drawn.size());
  const std::vector<RankedPrompt> prompts = side_by_side(batch, length, budget);
  const DeviceArray<std::byte> workspace(static_cast<std::size_t>(ranks_workspace_bytes(prompts)));
  const RanksArguments a{
      .prompts = prompts, .scores = scores.data(), .ranks = ranks.data(), .workspace = workspace.data()};
  launch_ranks(a, stream());
  const std::vector<std::int32_t> got = ranks.download();
  for (const RankedPrompt& prompt : prompts) {
    std::vector<std::int32_t> order(static_cast<std::size_t>(length));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t x, std::int32_t y) {
      return drawn[static_cast<std::size_t>(prompt.scores + x)] > drawn[static_cast<std::size_t>(prompt.scores + y)];
    });
    for (std::int32_t i = 0; i < length; ++i)
      if (got[static_cast<std::size_t>(prompt.ranks + order[static_cast<std::size_t>(i)])] != i + 1)
        return result.fail("a rank is not that of a sort");
  }
  measure(result, 8.0 * static_cast<double>(drawn.size()), [&] { launch_ranks(a, stream()); });
}

/// Eight layers of ranks compared.
void layer_variance(Result& result, Shape, Size size) {
  const auto [batch, length, budget, page] = size;
  constexpr std::int32_t kLayers = 8;
  std::mt19937 random(1);
  std::vector<std::int32_t> ring;
  for (int l = 0; l < kLayers; ++l) {
    const std::vector<std::int32_t> ranks = drawn_ranks(random, batch, length);
    ring.insert(ring.end(), ranks.begin(), ranks.end());
  }
  const std::int64_t stride = std::int64_t{batch} * length;
  const DeviceArray<std::int32_t> ranks(ring);
  const DeviceArray<LayerSelection> states(std::vector<LayerSelection>(static_cast<std::size_t>(batch)));
  const std::vector<RankedPrompt> prompts = side_by_side(batch, length, budget);
  const DeviceArray<std::byte> workspace(static_cast<std::size_t>(layer_selector_workspace_bytes(prompts)));
  LayerSelectorArguments a{
      .options = {.select = budget, .min_layer = kLayers, .observed_layers = kLayers, .threshold = -1},
      .layer = kLayers,
      .prompts = prompts,
      .ranks = ranks.data(),
      .states = states.data(),
      .workspace = workspace.data()};
  launch_layer_selector(a, stream());
  double sum = 0, counted = 0;
  for (std::int64_t t = 0; t < length; ++t) {
    double mean = 0, square = 0;
    std::int32_t least = length;
    for (std::int64_t l = 0; l < kLayers; ++l) {
      const std::int32_t rank = ring[static_cast<std::size_t>(l * stride + t)];
      least = std::min(least, rank);
      mean += rank / static_cast<double>(kLayers);
      square += std::pow(rank, 2.0) / kLayers;
    }
    if (least > budget - a.options.window) continue;
    sum += square - mean * mean;
    ++counted;
  }
  if (std::abs(states.download()[0].first - sum / counted) > 1e-6 * sum / counted)
    return result.fail("the variance is not that of a loop");
  measure(result, 4.0 * kLayers * static_cast<double>(stride), [&] { launch_layer_selector(a, stream()); });
}

/// Eight layers of masses compared, of tokens that the newest ranks leave behind.
void layer_masses(Result& result, Shape, Size size) {
  const auto [batch, length, budget, page] = size;
  constexpr std::int32_t kLayers = 8;
  std::mt19937 random(1);
  const std::vector<std::int32_t> newest = drawn_ranks(random, batch, length);
  const std::size_t of_layer = newest.size();
  std::vector<std::int32_t> ring(2 * kLayers * of_layer);  // zeros are masses that are 0, too
  std::copy(newest.begin(), newest.end(), ring.begin());   // layer 8 is at place 0
  const float each = 0.5F / static_cast<float>(length);
  const DeviceArray<std::int32_t> ranks(ring);
  const DeviceArray<float> masses(std::vector<float>(of_layer, each));
  const DeviceArray<LayerSelection> states(std::vector<LayerSelection>(static_cast<std::size_t>(batch)));
  const std::vector<RankedPrompt> prompts = side_by_side(batch, length, budget);
  const LayerSelectorOptions options{.select = budget,
                                     .min_layer = kLayers,
                                     .observed_layers = kLayers,
                                     .threshold = -1,
                                     .missed_mass = 0.01,
                                     .select_mass = 0.51};
  const DeviceArray<std::byte> workspace(static_cast<std::size_t>(layer_selector_workspace_bytes(prompts, options)));
  const LayerSelectorArguments a{.options = options,
                                 .layer = kLayers,
                                 .prompts = prompts,
                                 .ranks = ranks.data(),
                                 .masses = masses.data(),
                                 .states = states.data(),
                                 .workspace = workspace.data()};
  launch_layer_selector(a, stream());
  const LayerSelection state = states.download()[0];
  const std::int32_t want = std::min(length / 50, budget - options.window);
  if (std::abs(state.enough - want) > want / 50 + 1) return result.fail("not the tokens that hold the mass are enough");
  if (state.layer != -1) return result.fail("a layer selects that misses half of the mass");
  measure(result, 4.0 * (2 * kLayers + 1) * static_cast<double>(of_layer), [&] { launch_layer_selector(a, stream()); });
}

void narrow(Result& result, Shape, Size size) {
  const auto [batch, length, budget, page] = size;
  std::mt19937 random(1);
  const DeviceArray<std::int32_t> ranks(drawn_ranks(random, batch, length - 32)),
      tokens(static_cast<std::size_t>(batch) * static_cast<std::size_t>(budget));
  const std::vector<RankedPrompt> prompts = side_by_side(batch, length - 32, budget);
  const NarrowArguments a{
      .prompts = prompts, .select = budget, .window = 32, .ranks = ranks.data(), .tokens = tokens.data()};
  launch_narrow(a, stream());
  if (!ascend(tokens.download(), budget)) return result.fail("tokens do not ascend");
  measure(result, 4.0 * batch * (static_cast<double>(length) + budget), [&] { launch_narrow(a, stream()); });
}

/// Hidden states of bf16, one in length / budget of them.
void gather_rows(Result& result, Shape shape, Size size) {
  const auto [batch, length, budget, page] = size;
  const std::int64_t width = std::int64_t{shape.query_heads()} * shape.dim * 2;
  const DeviceArray<std::byte> hidden(static_cast<std::size_t>(std::int64_t{batch} * length * width)),
      packed(static_cast<std::size_t>(std::int64_t{batch} * budget * width));
  fill_with_noise(hidden.data(), hidden.size() / 2);
  std::vector<std::int32_t> lists;
  std::vector<GatheredPrompt> prompts;
  for (std::int32_t p = 0; p < batch; ++p) {
    prompts.push_back({.from = std::int64_t{p} * length,
                       .to = std::int64_t{p} * budget,
                       .kept = std::int64_t{p} * budget,
                       .rows = budget});
    for (std::int64_t i = 0; i < budget; ++i) lists.push_back(static_cast<std::int32_t>(i * length / budget));
  }
  const DeviceArray<std::int32_t> tokens(lists);
  const GatherRowsArguments a{.prompts = prompts,
                              .tokens = tokens.data(),
                              .from = hidden.data(),
                              .to = packed.data(),
                              .row_bytes = width,
                              .from_stride = width,
                              .to_stride = width};
  launch_gather_rows(a, stream());
  for (const std::int32_t row : sample_of(batch * budget)) {
    const std::int64_t from = std::int64_t{row / budget} * length + lists[static_cast<std::size_t>(row)];
    const auto bytes = static_cast<std::size_t>(width);
    if (packed.download(static_cast<std::size_t>(row) * bytes, bytes) !=
        hidden.download(static_cast<std::size_t>(from) * bytes, bytes))
      return result.fail("a row holds another row's bytes");
  }
  measure(result, 2.0 * static_cast<double>(packed.size()), [&] { launch_gather_rows(a, stream()); });
}

}  // namespace

void add_prefill() {
  add("PromptScores", prompt_scores, {{1, 32768, 2048}, {1, 65536, 2048}});
  add("WeightedSums", weighted_sums, {{1, 8192, 2048}, {1, 32768, 2048}});
  add("LastQuery", last_query, {{1, 32768, 2048}, {1, 131072, 2048}});
  add("Ranks", ranks, {{1, 8192, 2048}, {1, 32768, 2048}, {1, 131072, 2048}, {16, 8192, 2048}});
  add("LayerVariance", layer_variance, {{1, 32768, 2048}, {1, 131072, 2048}});
  add("LayerMasses", layer_masses, {{1, 32768, 2048}, {1, 131072, 2048}});
  add("Narrow", narrow, {{1, 32768, 2048}, {1, 131072, 2048}});
  add("GatherRows", gather_rows, {{1, 32768, 2048}, {1, 131072, 2048}});
}

}  // namespace kvkeep::cuda
