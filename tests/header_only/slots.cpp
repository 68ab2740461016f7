// SPDX-License-Identifier: Apache-2.0
// Prints which slots stay, over caches that are nothing but pointers. Compiled against kvkeep::kvkeep and against
// kvkeep::header_only; compare.cmake compares what the two print.

#include "slots.h"

#include <kvkeep/kvkeep.h>
#include <kvkeep/parts/folds.h>
#include <kvkeep/recipes.h>
#include <kvkeep/score/rkv.h>

#include <cstdio>
#include <cstring>
#include <random>
#include <string>

namespace {

constexpr std::int32_t kLayers = 2, kQueryHeads = 8, kKvHeads = 2, kDim = 64, kCapacity = 256;

kvkeep::ModelSpec model() {
  kvkeep::ModelSpec spec;
  spec.query_heads = kQueryHeads;
  spec.kv_heads = kKvHeads;
  spec.key_dim = spec.value_dim = kDim;
  for (int f = 0; f < kDim / 2; ++f) spec.rope.inv_freq.push_back(std::pow(1e4, -2.0 * f / kDim));
  spec.layers.resize(kLayers);
  return spec;
}

std::vector<float> numbers(std::size_t n, std::mt19937& dice) {
  std::vector<float> made(n);  // sums of even dice: the same with every standard library
  for (float& x : made)
    x = static_cast<float>((static_cast<double>(dice()) + static_cast<double>(dice())) * 0x1p-31 - 2.0);
  return made;
}

/// The bytes of `from` as the dtype says.
std::vector<std::byte> stored(const std::vector<float>& from, kvkeep::Dtype dtype) {
  std::vector<std::byte> bytes(from.size() * (dtype == kvkeep::Dtype::f32 ? 4 : 2));
  for (std::size_t i = 0; i < from.size(); ++i) {
    if (dtype == kvkeep::Dtype::f32) {
      std::memcpy(bytes.data() + 4 * i, &from[i], 4);
    } else {
      std::uint32_t bits = 0;
      std::memcpy(&bits, &from[i], 4);
      const auto half = static_cast<std::uint16_t>(bits >> 16);
      std::memcpy(bytes.data() + 2 * i, &half, 2);
    }
  }
  return bytes;
}

std::unique_ptr<kvkeep::KVPolicy> ams_tova() {
  return kvkeep::recipes::ams_tova(64, {{"interval", 16},
                                        {"prefill", "cut"},
                                        {"recent", 8},
                                        {"scorer.heads", "group"},
                                        {"allocator.min_segment", 8},
                                        {"allocator.min_quota", 2}});
}

/// R-KV folds what it drops: every loop of a span memory runs.
std::unique_ptr<kvkeep::KVPolicy> folding_rkv() {
  return kvkeep::recipes::evicting<kvkeep::Rkv>(
      {{"budget", 48}, {"interval", 16}, {"prefill", "cut"}, {"sink", 2}, {"recent", 8}, {"rest", "fold"}});
}

void print(const kvkeep::Keeper& keeper, const char* what, kvkeep::SequenceId id) {
  for (std::int32_t l = 0; l < kLayers; ++l)
    for (std::int32_t h = 0; h < kKvHeads; ++h) {
      std::printf("%s sequence %d layer %d head %d:", what, static_cast<int>(id), l, h);
      for (const std::int32_t position : keeper.positions(id, l, h)) std::printf(" %d", position);
      std::printf("\n");
    }
}

/// Prompts of three lengths, then decoding: each event prints the positions that every row holds.
void run(const char* what, kvkeep::Dtype dtype, std::unique_ptr<kvkeep::KVPolicy> policy) {
  std::mt19937 dice(7);
  const std::vector<kvkeep::SequenceId> ids{11, 22, 33};
  std::vector<std::int32_t> lengths(ids.size(), 0), tokens{211, 157, 31};
  std::vector<std::vector<std::byte>> keys(kLayers), values(kLayers);
  const kvkeep::CacheView view{.sequences = ids, .lengths = {.data = lengths}};
  std::vector<kvkeep::LayerKv> layers;
  const auto rows = static_cast<std::int64_t>(ids.size());
  for (std::size_t l = 0; l < kLayers; ++l) {
    keys[l] = stored(numbers(ids.size() * kKvHeads * kCapacity * kDim, dice), dtype);
    values[l] = stored(numbers(ids.size() * kKvHeads * kCapacity * kDim, dice), dtype);
    layers.push_back(kvkeep::DenseKv{{keys[l].data(), dtype, {rows, kKvHeads, kCapacity, kDim}},
                                     {values[l].data(), dtype, {rows, kKvHeads, kCapacity, kDim}}});
  }
  const bool folds = policy->memory() != nullptr;
  std::printf("%s: %s\n", what, policy->to_json().c_str());
  kvkeep::Keeper keeper(model(), std::move(policy), {.reads_folded = folds});
  keeper.bind(layers);
  for (const kvkeep::SequenceId id : ids) keeper.join(id);
  double folded = 0;  // of what attention reads of spans: a number for each run, not bits
  for (int step = 0; step < 40; ++step) {
    std::vector<std::int32_t> indptr{0};
    for (std::size_t i = 0; i < ids.size(); ++i) {
      indptr.push_back(indptr.back() + tokens[i]);
      lengths[i] += tokens[i];
    }
    const auto queries = numbers(static_cast<std::size_t>(indptr.back()) * kQueryHeads * kDim, dice);
    auto bytes = stored(queries, dtype);
    for (std::int32_t l = 0; l < kLayers; ++l) {
      const kvkeep::Observation seen{.layer = l,
                                     .sequences = ids,
                                     .indptr = indptr,
                                     .queries = {bytes.data(), dtype, {indptr.back(), kQueryHeads, kDim}},
                                     .basis = kvkeep::QueryBasis::post_rope};
      keeper.observe(seen);
      if (!folds) continue;
      const kvkeep::Attended out{kvkeep::zeros({indptr.back(), kQueryHeads, kDim}, kvkeep::Dtype::f32),
                                 kvkeep::zeros({indptr.back(), kQueryHeads}, kvkeep::Dtype::f32)};
      keeper.part<kvkeep::parts::Folds>().view(seen, out);
      for (std::int64_t n = 0; n < out.out.numel(); ++n)
        folded += std::abs(static_cast<double>(out.out.data<float>()[n]));
    }
    const kvkeep::Report report = keeper.step(view);
    for (const kvkeep::Cut& cut : report.cuts)
      print(keeper, (std::string(what) + " step " + std::to_string(step)).c_str(), cut.sequence);
    tokens.assign(ids.size(), 1);
  }
  if (folds) std::printf("%s folded: %.3g\n", what, folded);
}

/// One decision without a keeper, over positions of the caller.
void decide() {
  std::mt19937 dice(9);
  const kvkeep::ModelSpec spec = model();
  constexpr std::int32_t kLength = 100;
  auto keys = numbers(kLayers * kKvHeads * kLength * kDim, dice), values = keys;
  const auto queries = numbers(kLayers * kQueryHeads * kDim, dice);
  const kvkeep::SequenceId id = 1;
  std::int32_t length = kLength;
  const kvkeep::CacheView view{.sequences = {&id, 1}, .lengths = {.data = {&length, 1}}};
  std::vector<kvkeep::LayerKv> cache;
  for (std::size_t l = 0; l < kLayers; ++l) {
    const std::size_t at = l * kKvHeads * kLength * kDim;
    cache.push_back(kvkeep::DenseKv{{keys.data() + at, kvkeep::Dtype::f32, {1, kKvHeads, kLength, kDim}},
                                    {values.data() + at, kvkeep::Dtype::f32, {1, kKvHeads, kLength, kDim}}});
  }
  const std::vector<std::int32_t> layers = spec.full_layers(), due{0};
  kvkeep::RowTable table = kvkeep::make_rows(spec, cache, view, layers, due);
  std::vector<std::int32_t> positions(kLength);
  for (std::int32_t t = 0; t < kLength; ++t) positions[static_cast<std::size_t>(t)] = t;
  const std::int32_t newest = kLength - 1;
  for (kvkeep::Row& row : table.rows) row.positions = positions.data();
  for (std::size_t g = 0; g < table.groups.size(); ++g) {
    kvkeep::RowGroup& group = table.groups[g];
    group.next_position = kLength;
    group.seen = {kLength};
    group.queries = {.data = reinterpret_cast<const std::byte*>(queries.data() + g * kQueryHeads * kDim),
                     .dtype = kvkeep::Dtype::f32,
                     .token_stride = kQueryHeads * kDim * 4,
                     .head_stride = kDim * 4,
                     .positions = &newest,
                     .ring = 1,
                     .begin = 0,
                     .count = 1};
  }
  const kvkeep::Decision decision =
      ams_tova()->decide({.spec = spec, .table = table, .basis = kvkeep::QueryBasis::post_rope});
  for (std::size_t r = 0; decision.keep && r < table.rows.size(); ++r) {
    std::printf("decide row %zu:", r);
    for (const std::int32_t slot : decision.keep->row(r)) std::printf(" %d", slot);
    std::printf("\n");
  }
}

}  // namespace

int main() {
  run("ams-tova f32", kvkeep::Dtype::f32, ams_tova());
  run("ams-tova bf16", kvkeep::Dtype::bf16, ams_tova());
  run("rkv, folded, bf16", kvkeep::Dtype::bf16, folding_rkv());
  decide();
  for (const std::int32_t position : streamed(12)) std::printf("%d ", position);
  std::printf("\n");
}
