// SPDX-License-Identifier: Apache-2.0
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
  return std::clamp<std::int64_t>(kLogitsPerTile / (shape.group * std::max<std::int64_t>(1, slots)), 1,
                                  kMostTileTokens);
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

// The first slot that token i sees. A sliding layer never loses slots within its window, so its old slots hold the
// positions just before the step.
std::int64_t first_visible(const AttentionRow& row, const AttentionShape& shape, std::int64_t i) {
  if (shape.window == 0) return 0;
  const std::int32_t* positions = shape.positions + row.first_token;
  const std::int64_t oldest = positions[i] - shape.window + 1;
  if (oldest > row.begin) return row.slots_before + (std::lower_bound(positions, positions + i, oldest) - positions);
  return std::max<std::int64_t>(0, row.slots_before - (row.begin - oldest));
}

// Calls f(rows, first, count) for the slots [begin, begin + slots), in order, split where they stop being one stride
// apart; short runs (small pages) are gathered in `scratch` first, and numbers that the kernels do not read are widened
// there. Each output of the kernels is one sum over a slot's numbers, or continues where the last call left it, so the
// splits do not change a bit.
template <class F>
void for_runs(const cpu::StoredSide& stored, std::int64_t begin, std::int64_t slots, std::vector<std::byte>& scratch,
              const F& f) {
  constexpr std::int64_t kShortRun = 8, kGathered = 64;
  const SlotAddress& side = stored.slots;
  if (!stored.plain()) {
    const std::int64_t width = stored.dim * std::int64_t{sizeof(float)};
    scratch.resize(static_cast<std::size_t>(kGathered * width));
    auto* const numbers = reinterpret_cast<float*>(scratch.data());
    for (std::int64_t done = 0; done < slots; done += kGathered) {
      const std::int64_t count = std::min(kGathered, slots - done);
      for (std::int64_t i = 0; i < count; ++i) cpu::widen_stored(stored, begin + done + i, numbers + i * stored.dim);
      f(Rows{numbers, at::kFloat, stored.dim}, done, count);
    }
    return;
  }
  const at::ScalarType dtype = torch_dtype(stored.dtype);
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
      for (std::int64_t i = 0; i < count; ++i)
        std::memcpy(scratch.data() + i * side.width, side.at(begin + done + i), static_cast<std::size_t>(side.width));
      f(Rows{scratch.data(), dtype, side.width / bytes}, done, count);
    }
    done += count;
  }
}

// One tile; its methods are called in order. Several threads may share its logits by runs of slots, its weights by
// query, and its outputs by runs of dimensions: each number is one sum, whichever thread forms it.
class TileAttention {
 public:
  explicit TileAttention(const AttentionShape& shape) : shape_(shape) {}

  void begin(const AttentionRow& row, const Tile& tile, const float* queries) {
    row_ = &row;
    tile_ = tile;
    vectors_ = (tile.last - tile.first) * shape_.group;
    // Beginning at a multiple of the register keeps every slot in its lane, so sums do not depend on where the tile
    // begins.
    begin_ = first_visible(row, shape_, tile.first) / kWidestVector * kWidestVector;
    slots_ = row.slots_before + tile.last - begin_;
    gather(queries);
    logits_.resize(static_cast<std::size_t>(vectors_ * slots_));
    sums_.resize(static_cast<std::size_t>(vectors_));
    tops_.resize(static_cast<std::size_t>(vectors_));
    outputs_.assign(static_cast<std::size_t>(vectors_ * shape_.value_dim), 0.0F);
  }

  [[nodiscard]] std::int64_t slots() const { return slots_; }
  [[nodiscard]] std::int64_t vectors() const { return vectors_; }

  void logits(std::int64_t from, std::int64_t to, std::vector<std::byte>& scratch) {
    for_runs(row_->keys, begin_ + from, to - from, scratch,
             [&](const Rows& keys, std::int64_t first, std::int64_t count) {
               dots(keys, count, shape_.key_dim, queries_.data(), shape_.key_dim, vectors_,
                    logits_.data() + from + first, slots_);
             });
  }

  void weights(std::int64_t v) {
    float* logits = logits_.data() + v * slots_;
    hide(tile_.first + v / shape_.group, logits);
    sums_[static_cast<std::size_t>(v)] =
        exponentials(logits, slots_, shape_.scale, &tops_[static_cast<std::size_t>(v)]);
  }

  void outputs(std::int64_t from, std::int64_t to, std::vector<std::byte>& scratch) {
    for_runs(row_->values, begin_, slots_, scratch, [&](const Rows& values, std::int64_t first, std::int64_t count) {
      add_weighted_rows(values.columns(from), count, to - from, logits_.data() + first, slots_, vectors_,
                        outputs_.data() + from, shape_.value_dim);
    });
  }

  void end(float* out, float* log_sum_exp) const {
    scatter(out);
    if (log_sum_exp != nullptr) scatter_sums(log_sum_exp);
  }

 private:
  // The tile's queries side by side: token after token, heads of the group within.
  void gather(const float* queries) {
    const std::int64_t bundle = shape_.group * shape_.key_dim;
    queries_.resize(static_cast<std::size_t>((tile_.last - tile_.first) * bundle));
    for (std::int64_t i = tile_.first; i < tile_.last; ++i)
      std::copy_n(
          queries + ((row_->first_token + i) * shape_.query_heads + row_->kv_head * shape_.group) * shape_.key_dim,
          bundle, queries_.data() + (i - tile_.first) * bundle);
    // Keys are read as they are stored: q . k is the same if both are rotated.
    if (row_->keys.rotated > 0) cpu::rotate(queries_.data(), std::ssize(queries_), row_->keys.rotated);
  }

  // -inf for slots that token i may not see: the future, those outside its window, those that the caller's mask hides.
  void hide(std::int64_t i, float* logits) const {
    constexpr float kHidden = -HUGE_VALF;
    const std::int64_t seen = first_visible(*row_, shape_, i) - begin_, end = row_->slots_before + i + 1 - begin_;
    std::fill(logits, logits + seen, kHidden);
    std::fill(logits + end, logits + slots_, kHidden);
    if (row_->visible == nullptr) return;
    for (std::int64_t slot = begin_ + seen; slot < row_->slots_before; ++slot)
      if (row_->visible[slot] == 0) logits[slot - begin_] = kHidden;
  }

  void scatter(float* out) const {
    for (std::int64_t i = tile_.first; i < tile_.last; ++i)
      for (std::int64_t g = 0; g < shape_.group; ++g) {
        const std::int64_t v = (i - tile_.first) * shape_.group + g;
        const float normaliser = 1.0F / sums_[static_cast<std::size_t>(v)];
        const float* from = outputs_.data() + v * shape_.value_dim;
        float* to =
            out + ((row_->first_token + i) * shape_.query_heads + row_->kv_head * shape_.group + g) * shape_.value_dim;
        for (std::int64_t d = 0; d < shape_.value_dim; ++d) to[d] = from[d] * normaliser;
        if (row_->values.rotated > 0) cpu::rotate(to, shape_.value_dim, row_->values.rotated);
      }
  }

  void scatter_sums(float* out) const {
    for (std::int64_t i = tile_.first; i < tile_.last; ++i)
      for (std::int64_t g = 0; g < shape_.group; ++g) {
        const auto v = static_cast<std::size_t>((i - tile_.first) * shape_.group + g);
        out[(row_->first_token + i) * shape_.query_heads + row_->kv_head * shape_.group + g] =
            shape_.scale * tops_[v] + std::log(sums_[v]);
      }
  }

  AttentionShape shape_;
  const AttentionRow* row_ = nullptr;
  Tile tile_ = {};
  std::int64_t vectors_ = 0, begin_ = 0, slots_ = 0;
  std::vector<float> queries_, logits_, sums_, tops_, outputs_;
};

constexpr std::int64_t kWorthAThread = 512 * 1024;  // multiply-adds

// Threads take whole tiles.
void attend_by_tile(std::span<const AttentionRow> rows, const std::vector<Tile>& tiles, const AttentionShape& shape,
                    std::int64_t work, const float* queries, float* out, float* log_sum_exp) {
  const auto count = static_cast<std::int64_t>(tiles.size());
  const std::int64_t grain = std::clamp<std::int64_t>(count * kWorthAThread / std::max<std::int64_t>(1, work), 1,
                                                      std::max<std::int64_t>(1, count));
  at::parallel_for(0, count, grain, [&](std::int64_t first, std::int64_t last) {
    TileAttention attention(shape);
    std::vector<std::byte> scratch;
    for (std::int64_t t = first; t < last; ++t) {
      const Tile& tile = tiles[static_cast<std::size_t>(t)];
      attention.begin(rows[static_cast<std::size_t>(tile.row)], tile, queries);
      attention.logits(0, attention.slots(), scratch);
      for (std::int64_t v = 0; v < attention.vectors(); ++v) attention.weights(v);
      attention.outputs(0, shape.value_dim, scratch);
      attention.end(out, log_sum_exp);
    }
  });
}

// Few tiles over long rows, as in decoding: threads share each of them.
void attend_inside_tiles(std::span<const AttentionRow> rows, const std::vector<Tile>& tiles,
                         const AttentionShape& shape, const float* queries, float* out, float* log_sum_exp) {
  struct Piece {
    TileAttention* tile;
    std::int64_t from, to;
  };
  constexpr std::int64_t kSlots = 512, kDims = 2 * kWidestVector;
  std::vector<TileAttention> attentions(tiles.size(), TileAttention(shape));
  std::vector<Piece> slots, vectors, dims;
  for (std::size_t t = 0; t < tiles.size(); ++t) {
    TileAttention& one = attentions[t];
    one.begin(rows[static_cast<std::size_t>(tiles[t].row)], tiles[t], queries);
    const auto cut = [&one](std::vector<Piece>& pieces, std::int64_t length, std::int64_t step) {
      for (std::int64_t from = 0; from < length; from += step)
        pieces.push_back({&one, from, std::min(from + step, length)});
    };
    cut(slots, one.slots(), kSlots);
    cut(vectors, one.vectors(), 1);
    cut(dims, shape.value_dim, kDims);
  }
  const auto each = [](const std::vector<Piece>& pieces, auto&& f) {
    at::parallel_for(0, static_cast<std::int64_t>(pieces.size()), 1, [&](std::int64_t first, std::int64_t last) {
      std::vector<std::byte> scratch;
      for (std::int64_t i = first; i < last; ++i) f(pieces[static_cast<std::size_t>(i)], scratch);
    });
  };
  each(slots, [](const Piece& p, std::vector<std::byte>& scratch) { p.tile->logits(p.from, p.to, scratch); });
  each(vectors, [](const Piece& p, std::vector<std::byte>&) { p.tile->weights(p.from); });
  each(dims, [](const Piece& p, std::vector<std::byte>& scratch) { p.tile->outputs(p.from, p.to, scratch); });
  for (const TileAttention& one : attentions) one.end(out, log_sum_exp);
}

}  // namespace

void attend(std::span<const AttentionRow> rows, const AttentionShape& shape, const float* queries, float* out,
            float* log_sum_exp) {
  const std::vector<Tile> tiles = tiles_of(rows, shape);
  std::int64_t work = 0;  // multiply-adds, to keep small steps on one thread
  for (const AttentionRow& row : rows)
    work += row.new_tokens * (row.slots_before + row.new_tokens) * shape.group * (shape.key_dim + shape.value_dim);
  const auto threads = static_cast<std::int64_t>(at::get_num_threads());
  const bool uneven = static_cast<std::int64_t>(tiles.size()) < 4 * threads && work >= threads * kWorthAThread;
  if (threads > 1 && uneven && !at::in_parallel_region())
    attend_inside_tiles(rows, tiles, shape, queries, out, log_sum_exp);
  else
    attend_by_tile(rows, tiles, shape, work, queries, out, log_sum_exp);
}

}  // namespace kvkeep::lm::detail
