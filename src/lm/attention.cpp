#include "attention.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace kvkeep::lm::detail {
namespace {

constexpr std::int64_t kLogitsPerTile = 512 * 1024;  // 2 MB of f32
constexpr std::int64_t kMostTileTokens = 32;

struct Tile {
  std::int64_t row;          // index into the rows
  std::int64_t first, last;  // tokens of the row's sequence
};

std::int64_t tile_tokens(const AttentionRow& row, const AttentionShape& shape) {
  const std::int64_t slots = row.slots_before + row.new_tokens;
  return std::clamp<std::int64_t>(kLogitsPerTile / (shape.group * std::max<std::int64_t>(1, slots)), 1, kMostTileTokens);
}

std::vector<Tile> tiles_of(std::span<const AttentionRow> rows, const AttentionShape& shape) {
  std::vector<Tile> tiles;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    const std::int64_t step = tile_tokens(rows[r], shape);
    for (std::int64_t first = 0; first < rows[r].new_tokens; first += step)
      tiles.push_back({static_cast<std::int64_t>(r), first, std::min(first + step, rows[r].new_tokens)});
  }
  return tiles;
}

// The first slot that token i sees. A sliding layer is never cut inside, so its old slots hold the positions just before the step.
std::int64_t first_visible(const AttentionRow& row, const AttentionShape& shape, std::int64_t i) {
  if (shape.window == 0) return 0;
  const std::int32_t* positions = shape.positions + row.first_token;
  const std::int64_t oldest = positions[i] - shape.window + 1;
  if (oldest > row.begin) return row.slots_before + (std::lower_bound(positions, positions + i, oldest) - positions);
  return std::max<std::int64_t>(0, row.slots_before - (row.begin - oldest));
}

// Calls f(rows, first, count) for the slots [begin, begin + slots), in order, cut where they cease to lie one stride apart; short runs (small pages) are gathered in
// `scratch` first. Each output of the kernels is one sum over a slot's numbers, or goes on where the last call left it: the cuts change no bit.
template <class F>
void for_runs(const SlotAddress& side, ScalarType dtype, std::int64_t begin, std::int64_t slots, std::vector<std::byte>& scratch, const F& f) {
  constexpr std::int64_t kShortRun = 8, kGathered = 64;
  const auto bytes = static_cast<std::int64_t>(c10::elementSize(dtype));
  const auto run = [&](std::int64_t slot) {
    std::int64_t count = std::min(side.run(slot), begin + slots - slot);
    while (slot + count < begin + slots && side.at(slot + count) == side.at(slot) + count * side.stride)
      count += std::min(side.run(slot + count), begin + slots - slot - count);
    return count;
  };
  for (std::int64_t done = 0; done < slots;) {
    std::int64_t count = run(begin + done);
    if (count >= kShortRun || count == slots - done) {
      f(Rows{side.at(begin + done), dtype, side.stride / bytes}, done, count);
    } else {
      count = std::min(kGathered, slots - done);
      scratch.resize(static_cast<std::size_t>(kGathered * side.width));
      for (std::int64_t i = 0; i < count; ++i) std::memcpy(scratch.data() + i * side.width, side.at(begin + done + i), static_cast<std::size_t>(side.width));
      f(Rows{scratch.data(), dtype, side.width / bytes}, done, count);
    }
    done += count;
  }
}

class TileAttention {
 public:
  explicit TileAttention(const AttentionShape& shape) : shape_(shape) {}

  void operator()(const AttentionRow& row, const Tile& tile, const float* queries, float* out, float* log_sum_exp) {
    const std::int64_t tokens = tile.last - tile.first, vectors = tokens * shape_.group;
    // Beginning at a multiple of the register keeps every slot in its lane, so sums do not depend on where the tile begins.
    const std::int64_t begin = first_visible(row, shape_, tile.first) / kWidestVector * kWidestVector;
    const std::int64_t slots = row.slots_before + tile.last - begin;
    gather(row, tile, queries);
    logits_.resize(static_cast<std::size_t>(vectors * slots));
    for_runs(row.keys, row.key_dtype, begin, slots, scratch_, [&](const Rows& keys, std::int64_t first, std::int64_t count) {
      dots(keys, count, shape_.key_dim, queries_.data(), shape_.key_dim, vectors, logits_.data() + first, slots);
    });

    sums_.resize(static_cast<std::size_t>(vectors));
    tops_.resize(static_cast<std::size_t>(vectors));
    for (std::int64_t v = 0; v < vectors; ++v) {
      float* logits = logits_.data() + v * slots;
      hide(row, tile.first + v / shape_.group, begin, slots, logits);
      sums_[static_cast<std::size_t>(v)] = exponentials(logits, slots, shape_.scale, &tops_[static_cast<std::size_t>(v)]);
    }
    outputs_.assign(static_cast<std::size_t>(vectors * shape_.value_dim), 0.0F);
    for_runs(row.values, row.value_dtype, begin, slots, scratch_, [&](const Rows& values, std::int64_t first, std::int64_t count) {
      add_weighted_rows(values, count, shape_.value_dim, logits_.data() + first, slots, vectors, outputs_.data(), shape_.value_dim);
    });
    scatter(row, tile, out);
    if (log_sum_exp != nullptr) scatter_sums(row, tile, log_sum_exp);
  }

 private:
  // The tile's queries side by side: token after token, heads of the group within.
  void gather(const AttentionRow& row, const Tile& tile, const float* queries) {
    const std::int64_t bundle = shape_.group * shape_.key_dim;
    queries_.resize(static_cast<std::size_t>((tile.last - tile.first) * bundle));
    for (std::int64_t i = tile.first; i < tile.last; ++i)
      std::copy_n(queries + ((row.first_token + i) * shape_.query_heads + row.kv_head * shape_.group) * shape_.key_dim, bundle,
                  queries_.data() + (i - tile.first) * bundle);
  }

  // -inf for what token i may not see: the future, what slid out of its window, what the caller's mask hides.
  void hide(const AttentionRow& row, std::int64_t i, std::int64_t begin, std::int64_t slots, float* logits) const {
    constexpr float kHidden = -HUGE_VALF;
    const std::int64_t seen = first_visible(row, shape_, i) - begin, end = row.slots_before + i + 1 - begin;
    std::fill(logits, logits + seen, kHidden);
    std::fill(logits + end, logits + slots, kHidden);
    if (row.visible == nullptr) return;
    for (std::int64_t slot = begin + seen; slot < row.slots_before; ++slot)
      if (row.visible[slot] == 0) logits[slot - begin] = kHidden;
  }

  void scatter(const AttentionRow& row, const Tile& tile, float* out) const {
    for (std::int64_t i = tile.first; i < tile.last; ++i)
      for (std::int64_t g = 0; g < shape_.group; ++g) {
        const std::int64_t v = (i - tile.first) * shape_.group + g;
        const float normaliser = 1.0F / sums_[static_cast<std::size_t>(v)];
        const float* from = outputs_.data() + v * shape_.value_dim;
        float* to = out + ((row.first_token + i) * shape_.query_heads + row.kv_head * shape_.group + g) * shape_.value_dim;
        for (std::int64_t d = 0; d < shape_.value_dim; ++d) to[d] = from[d] * normaliser;
      }
  }

  void scatter_sums(const AttentionRow& row, const Tile& tile, float* out) const {
    for (std::int64_t i = tile.first; i < tile.last; ++i)
      for (std::int64_t g = 0; g < shape_.group; ++g) {
        const auto v = static_cast<std::size_t>((i - tile.first) * shape_.group + g);
        out[(row.first_token + i) * shape_.query_heads + row.kv_head * shape_.group + g] = shape_.scale * tops_[v] + std::log(sums_[v]);
      }
  }

  AttentionShape shape_;
  std::vector<float> queries_, logits_, sums_, tops_, outputs_;
  std::vector<std::byte> scratch_;
};

}  // namespace

void attend(std::span<const AttentionRow> rows, const AttentionShape& shape, const float* queries, float* out, float* log_sum_exp) {
  const std::vector<Tile> tiles = tiles_of(rows, shape);
  std::int64_t work = 0;  // multiply-adds, to keep small steps on one thread
  for (const AttentionRow& row : rows)
    work += row.new_tokens * (row.slots_before + row.new_tokens) * shape.group * (shape.key_dim + shape.value_dim);
  const auto count = static_cast<std::int64_t>(tiles.size());
  constexpr std::int64_t kWorthAThread = 512 * 1024;
  const std::int64_t grain =
      std::clamp<std::int64_t>(count * kWorthAThread / std::max<std::int64_t>(1, work), 1, std::max<std::int64_t>(1, count));
  at::parallel_for(0, count, grain, [&](std::int64_t first, std::int64_t last) {
    TileAttention attend_tile(shape);
    for (std::int64_t t = first; t < last; ++t) {
      const Tile& tile = tiles[static_cast<std::size_t>(t)];
      attend_tile(rows[static_cast<std::size_t>(tile.row)], tile, queries, out, log_sum_exp);
    }
  });
}

}  // namespace kvkeep::lm::detail
