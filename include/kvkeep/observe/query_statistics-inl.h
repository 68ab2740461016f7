#pragma once
// Bodies of query_statistics.h: compiled by src/observe, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <cmath>

#include "kvkeep/core/error.h"
#include "kvkeep/core/finite.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/parallel.h"
#include "kvkeep/observe/query_block.h"
#include "kvkeep/observe/query_statistics.h"
#include "kvkeep/simd/expected_lanes.h"

namespace kvkeep {
namespace cpu {

KVKEEP_INLINE void QueryBlock::reserve(std::int64_t rows, std::int64_t dim) {
  x.resize(static_cast<std::size_t>(rows * gram_stride(dim) + gram_rows(dim)));
  products.resize(static_cast<std::size_t>(gram_rows(dim) * gram_stride(dim)));
  mean.resize(static_cast<std::size_t>(dim));
  mean32.resize(mean.size());
}

KVKEEP_INLINE std::int64_t QueryBlock::bytes(std::int64_t rows, std::int64_t dim) {
  return 4 * (gram_stride(dim) * (rows + gram_rows(dim)) + gram_rows(dim)) + 12 * dim;
}

KVKEEP_INLINE void QueryBlock::centre(std::int64_t rows, std::int64_t dim, std::int32_t head) {
  const std::int64_t stride = gram_stride(dim);
  KVKEEP_REQUIRE(column_means(x.data(), rows, dim, stride, mean.data()), "expected: a query of head ", head,
                 " holds a number that is not finite; allowed finite numbers");
  std::copy(mean.begin(), mean.end(), mean32.begin());
  const float top = centre_rows(x.data(), rows, dim, stride, mean32.data());
  KVKEEP_REQUIRE(std::isfinite(top), "expected: queries of head ", head,
                 " are further apart than fp32 can represent; allowed below 1e38");
  scale = 1;
  if (top == 0 || (top > 0x1p-20F && top < 0x1p40F)) return;
  int exponent = 0;
  std::frexp(top, &exponent);
  scale = std::ldexp(1.0, exponent);
  for (int left = -exponent; left != 0;) {  // in steps whose factor fits a float
    const int step = std::clamp(left, -100, 100);
    scale_rows(x.data(), rows, stride, std::ldexp(1.0F, step));
    left -= step;
  }
}

KVKEEP_INLINE void QueryBlock::multiply(std::int64_t rows, std::int64_t dim) {
  gram(x.data(), rows, dim, products.data());
}

}  // namespace cpu

struct QueryStatistics::HeadWorkspace {
  cpu::QueryBlock block;
  QueryMoments moments;
  std::vector<double> apart;

  explicit HeadWorkspace(std::int32_t dim) : moments(dim), apart(static_cast<std::size_t>(dim)) {
    block.reserve(kBlock, dim);
  }
};

struct QueryStatistics::Workspace {
  std::vector<HeadWorkspace> heads;
  cpu::TurnBack back;
};

KVKEEP_INLINE std::shared_ptr<QueryStatistics::Workspace> QueryStatistics::workspace(std::int32_t query_heads,
                                                                                     std::int32_t key_dim,
                                                                                     const RopeSpec& rope) {
  auto made = std::make_shared<Workspace>();
  for (std::int32_t h = 0; h < query_heads; ++h) made->heads.emplace_back(key_dim);
  made->back.fill(rope, 1, [](std::int64_t) { return 0; });
  return made;
}

KVKEEP_INLINE void QueryMoments::merge(const QueryMoments& other, std::span<double> apart) {
  if (other.count == 0) return;
  const auto mine = static_cast<double>(count), theirs = static_cast<double>(other.count), all = mine + theirs;
  std::size_t place = 0;
  for (std::size_t i = 0; i < mean.size(); ++i) {
    apart[i] = other.mean[i] - mean[i];
    const double weighed = apart[i] * (mine * theirs / all);
    for (std::size_t j = 0; j <= i; ++j, ++place) second[place] += other.second[place] + weighed * apart[j];
  }
  for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += apart[i] * (theirs / all);
  count += other.count;
}

KVKEEP_INLINE QueryStatistics::QueryStatistics(std::int32_t query_heads, std::int32_t key_dim, std::int32_t from)
    : dim_(key_dim),
      from_(from),
      heads_(static_cast<std::size_t>(query_heads), QueryMoments(key_dim)),
      newest_(static_cast<std::size_t>(kBlock + kRollback) * static_cast<std::size_t>(query_heads) *
              static_cast<std::size_t>(key_dim)) {}

KVKEEP_INLINE bool QueryStatistics::finite(const std::byte* data, Dtype dtype, std::int64_t token_stride,
                                           std::int64_t head_stride, std::span<const std::int32_t> positions) const {
  bool all = true;
  for (std::size_t i = 0; i < positions.size(); ++i, data += token_stride)
    for (std::size_t h = 0; positions[i] >= from_ && h < heads_.size(); ++h)
      all = all && all_finite(data + static_cast<std::int64_t>(h) * head_stride, dtype, dim_);
  return all;
}

KVKEEP_INLINE void QueryStatistics::check(std::string_view where, const std::byte* data, Dtype dtype,
                                          std::int64_t token_stride, std::int64_t head_stride,
                                          std::span<const std::int32_t> positions) const {
  for (std::size_t i = 0; i < positions.size(); ++i, data += token_stride)
    for (std::size_t h = 0; positions[i] >= from_ && h < heads_.size(); ++h)
      KVKEEP_REQUIRE(all_finite(data + static_cast<std::int64_t>(h) * head_stride, dtype, dim_), where,
                     ": query of head ", h, " at position ", positions[i],
                     " holds a number that is not finite, or is beyond ", kLargestQuery,
                     "; allowed finite numbers up to that");
}

KVKEEP_INLINE void QueryStatistics::add(const std::byte* data, Dtype dtype, std::int64_t token_stride,
                                        std::int64_t head_stride, std::span<const std::int32_t> positions,
                                        QueryBasis basis, const RopeSpec& rope, Workspace& workspace) {
  check("expected", data, dtype, token_stride, head_stride, positions);
  const auto heads = static_cast<std::int64_t>(heads_.size());
  const bool turned = basis == QueryBasis::post_rope && !rope.inv_freq.empty();
  for (std::size_t i = 0; i < positions.size(); ++i, data += token_stride) {
    if (positions[i] < from_) {
      ++skipped_;
      continue;
    }
    if (pending_ == kBlock + kRollback) {
      parallel_for(0, heads, 4, [&](std::int64_t begin, std::int64_t end) {
        for (auto h = static_cast<std::size_t>(begin); h < static_cast<std::size_t>(end); ++h)
          take_in(heads_[h], static_cast<std::int32_t>(h), 0, kBlock, workspace.heads[h]);
      });
      std::copy(newest_.begin() + kBlock * heads * dim_, newest_.end(), newest_.begin());
      pending_ -= kBlock;
    }
    if (turned) workspace.back.fill(rope, 1, [&](std::int64_t) { return positions[i]; });
    for (std::int64_t h = 0; h < heads; ++h) {
      float* x = newest_.data() + (pending_ * heads + h) * dim_;
      cpu::widen(data + h * head_stride, dtype, dim_, x);
      if (turned) workspace.back.apply(rope, 0, x);
    }
    ++pending_;
  }
}

KVKEEP_INLINE void QueryStatistics::take_in(QueryMoments& to, std::int32_t head, std::int64_t first, std::int64_t rows,
                                            HeadWorkspace& in) const {
  cpu::QueryBlock& block = in.block;
  const std::int64_t stride = cpu::gram_stride(dim_);
  for (std::int64_t i = 0; i < rows; ++i)
    std::copy_n(newest_.data() + ((first + i) * static_cast<std::int64_t>(heads_.size()) + head) * dim_, dim_,
                block.x.data() + i * stride);
  block.centre(rows, dim_, head);
  block.multiply(rows, dim_);
  in.moments.count = rows;
  std::ranges::copy(block.mean, in.moments.mean.begin());
  std::size_t place = 0;
  const double squared = block.scale * block.scale;
  for (std::int64_t i = 0; i < dim_; ++i)
    for (std::int64_t j = 0; j <= i; ++j, ++place)
      in.moments.second[place] =
          static_cast<double>(block.products[static_cast<std::size_t>(j * stride + i)]) * squared;
  to.merge(in.moments, in.apart);
}

KVKEEP_INLINE bool QueryStatistics::can_forget(std::int64_t tokens) const {
  return tokens <= pending_ + (heads_.front().count == 0 ? skipped_ : 0);
}

KVKEEP_INLINE void QueryStatistics::forget(std::int64_t tokens) {
  const std::int64_t counted = std::min(tokens, pending_);
  pending_ -= counted;
  skipped_ -= tokens - counted;
}

KVKEEP_INLINE QueryMoments QueryStatistics::moments(std::int32_t head) const {
  QueryMoments all = heads_[static_cast<std::size_t>(head)];
  HeadWorkspace in(dim_);
  for (std::int64_t first = 0; first < pending_; first += kBlock)
    take_in(all, head, first, std::min<std::int64_t>(kBlock, pending_ - first), in);
  return all;
}

KVKEEP_INLINE QueryStatistics::Held QueryStatistics::held() const {
  const auto numbers = pending_ * static_cast<std::int64_t>(heads_.size()) * dim_;
  return {.heads = heads_, .skipped = skipped_, .newest = {newest_.begin(), newest_.begin() + numbers}};
}

KVKEEP_INLINE void QueryStatistics::take(Held held) {
  const std::size_t numbers = heads_.size() * static_cast<std::size_t>(dim_), tokens = held.newest.size() / numbers;
  const QueryMoments none(dim_);
  const bool fits = std::ranges::all_of(held.heads, [&](const QueryMoments& m) {
    return m.count >= 0 && m.count == held.heads.front().count && m.mean.size() == none.mean.size() &&
           m.second.size() == none.second.size();
  });
  KVKEEP_REQUIRE(fits && held.heads.size() == heads_.size() && held.skipped >= 0 &&
                     tokens * numbers == held.newest.size() && held.newest.size() <= newest_.size(),
                 "query statistics: ", held.heads.size(), " heads, ", held.newest.size(), " newest numbers, ",
                 held.skipped, " tokens left out; allowed ", heads_.size(),
                 " heads that have counted the same tokens, and at most ", kBlock + kRollback, " newest tokens of ",
                 numbers, " numbers");
  heads_ = std::move(held.heads);
  skipped_ = held.skipped;
  pending_ = static_cast<std::int64_t>(tokens);
  std::ranges::copy(held.newest, newest_.begin());
}

KVKEEP_INLINE std::int64_t QueryStatistics::bytes() const {
  const auto heads = static_cast<std::int64_t>(heads_.size()), dim = std::int64_t{dim_};
  return heads * dim * (4 * (dim + 3) + 4 * (kBlock + kRollback));
}

}  // namespace kvkeep
