#pragma once
// Bodies of query_statistics.h: compiled by src/observe, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <cmath>
#include <map>

#include "kvkeep/core/error.h"
#include "kvkeep/core/finite.h"
#include "kvkeep/core/hd.h"
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
  const std::int32_t exponent = moment_exponent(top);
  scale = std::ldexp(1.0, exponent);
  for (std::int32_t left = -exponent; left != 0;) scale_rows(x.data(), rows, stride, moment_step(left));
}

KVKEEP_INLINE void QueryBlock::multiply(std::int64_t rows, std::int64_t dim) {
  gram(x.data(), rows, dim, products.data());
}

}  // namespace cpu

struct QueryStatistics::HeadWorkspace {
  cpu::QueryBlock block;
  std::vector<double> apart;

  explicit HeadWorkspace(std::int32_t dim) : apart(static_cast<std::size_t>(dim)) { block.reserve(kBlock, dim); }
};

struct QueryStatistics::Workspace {
  std::vector<HeadWorkspace> heads;
  cpu::TurnBack back;
  std::map<const RopeSpec*, DeviceMemory> inv_freq;  ///< f64 [pairs] where the memory forms moments
};

KVKEEP_INLINE std::shared_ptr<QueryStatistics::Workspace> QueryStatistics::workspace(std::int32_t query_heads,
                                                                                     std::int32_t key_dim,
                                                                                     const MachineMemory& memory) {
  auto made = std::make_shared<Workspace>();
  if (memory.forms_moments()) return made;
  for (std::int32_t h = 0; h < query_heads; ++h) made->heads.emplace_back(key_dim);
  for (std::vector<float>* turns : {&made->back.cosines, &made->back.sines})
    turns->reserve(static_cast<std::size_t>(key_dim / 2));
  return made;
}

KVKEEP_INLINE QueryStatistics::QueryStatistics(std::int32_t query_heads, std::int32_t key_dim, std::int32_t from,
                                               MachineMemory& memory)
    : heads_(query_heads), dim_(key_dim), from_(from), memory_(&memory), held_(memory.allocate(bytes())) {}

KVKEEP_INLINE MomentsView QueryStatistics::view() const {
  MomentsView view{.count = count_, .begin = begin_, .pending = pending_};
  view.second = static_cast<double*>(held_.get());
  view.mean = view.second + heads_ * triangle();
  view.newest = static_cast<float*>(static_cast<void*>(view.mean + token_numbers()));
  return view;
}

KVKEEP_INLINE bool QueryStatistics::finite(const std::byte* data, Dtype dtype, std::int64_t token_stride,
                                           std::int64_t head_stride, std::span<const std::int32_t> positions) const {
  bool all = true;
  for (std::size_t i = 0; !memory_->forms_moments() && i < positions.size(); ++i, data += token_stride)
    for (std::int32_t h = 0; positions[i] >= from_ && h < heads_; ++h)
      all = all && all_finite(data + h * head_stride, dtype, dim_);
  return all;
}

KVKEEP_INLINE void QueryStatistics::check(std::string_view where, const std::byte* data, Dtype dtype,
                                          std::int64_t token_stride, std::int64_t head_stride,
                                          std::span<const std::int32_t> positions) const {
  for (std::size_t i = 0; i < positions.size(); ++i, data += token_stride)
    for (std::int32_t h = 0; positions[i] >= from_ && h < heads_; ++h)
      KVKEEP_REQUIRE(all_finite(data + h * head_stride, dtype, dim_), where, ": query of head ", h, " at position ",
                     positions[i], " holds a number that is not finite, or is beyond ", kLargestQuery,
                     "; allowed finite numbers up to that");
}

KVKEEP_INLINE void QueryStatistics::add(const std::byte* data, Dtype dtype, std::int64_t token_stride,
                                        std::int64_t head_stride, std::span<const std::int32_t> positions,
                                        QueryBasis basis, const RopeSpec& rope, Workspace& workspace) {
  check("expected", data, dtype, token_stride, head_stride, positions);
  const bool turned = basis == QueryBasis::post_rope && !rope.inv_freq.empty();
  for (std::size_t i = 0; i < positions.size(); ++i, data += token_stride) {
    if (positions[i] < from_) {
      ++skipped_;
      continue;
    }
    if (pending_ == kMomentRing) {
      const MomentsView view = this->view();
      parallel_for(0, heads_, 4, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t h = begin; h < end; ++h)
          take_in(view.mean + h * dim_, view.second + h * triangle(), count_, static_cast<std::int32_t>(h),
                  newest(0) + h * dim_, token_numbers(), kBlock, workspace.heads[static_cast<std::size_t>(h)]);
      });
      count_ += kBlock;
      begin_ = (begin_ + kBlock) % kMomentRing;
      pending_ -= kBlock;
    }
    if (turned) workspace.back.fill(rope, 1, [&](std::int64_t) { return positions[i]; });
    for (std::int64_t h = 0; h < heads_; ++h) {
      float* x = newest(pending_) + h * dim_;
      cpu::widen(data + h * head_stride, dtype, dim_, x);
      if (turned) workspace.back.apply(rope, 0, x);
    }
    ++pending_;
  }
}

KVKEEP_INLINE void QueryStatistics::place(std::int32_t first, std::span<const std::int32_t> positions,
                                          std::vector<MomentsArrival>& arrivals) {
  for (std::size_t i = 0; i < positions.size();) {
    if (positions[i] < from_) {
      ++skipped_, ++i;
      continue;
    }
    MomentsArrival arrival{.before = view(), .first = first + static_cast<std::int32_t>(i), .position = positions[i]};
    for (; i < positions.size() && positions[i] == arrival.position + arrival.tokens; ++i) ++arrival.tokens;
    arrivals.push_back(arrival);
    const std::int64_t taken = blocks_taken_in(pending_, arrival.tokens) * kBlock;
    count_ += taken;
    begin_ = static_cast<std::int32_t>((begin_ + taken) % kMomentRing);
    pending_ = static_cast<std::int32_t>(pending_ + arrival.tokens - taken);
  }
}

KVKEEP_INLINE MomentsLayout QueryStatistics::layout(MachineMemory& memory, const QueryLayout& queries, Dtype dtype,
                                                    std::int32_t key_dim, QueryBasis basis, const RopeSpec& rope,
                                                    Workspace& workspace) {
  MomentsLayout layout{.queries = queries, .dtype = dtype, .dim = key_dim};
  if (basis == QueryBasis::pre_rope || rope.inv_freq.empty()) return layout;
  auto known = workspace.inv_freq.find(&rope);
  if (known == workspace.inv_freq.end()) {
    const std::int64_t bytes = std::ssize(rope.inv_freq) * 8;
    DeviceMemory table = memory.allocate(bytes);
    memory.write(table.get(), rope.inv_freq.data(), bytes);
    known = workspace.inv_freq.emplace(&rope, std::move(table)).first;
  }
  layout.rope = rope.view(static_cast<const double*>(known->second.get()));
  return layout;
}

KVKEEP_INLINE void QueryStatistics::take_in(double* mean, double* second, std::int64_t count, std::int32_t head,
                                            const float* queries, std::int64_t stride, std::int64_t rows,
                                            HeadWorkspace& in) const {
  cpu::QueryBlock& block = in.block;
  const std::int64_t width = cpu::gram_stride(dim_);
  for (std::int64_t i = 0; i < rows; ++i) std::copy_n(queries + i * stride, dim_, block.x.data() + i * width);
  block.centre(rows, dim_, head);
  block.multiply(rows, dim_);
  if (count == 0) {  // unset so far
    std::fill_n(mean, dim_, 0.0);
    std::fill_n(second, triangle(), 0.0);
  }
  const MomentWeights weights = moment_weights(count, rows);
  const double squared = block.scale * block.scale;
  for (std::int64_t i = 0; i < dim_; ++i) {
    const auto at = static_cast<std::size_t>(i);
    in.apart[at] = block.mean[at] - mean[i];
    for (std::int64_t j = 0; j <= i; ++j, ++second)
      *second = joined_moment(
          *second, product(static_cast<double>(block.products[static_cast<std::size_t>(j * width + i)]), squared),
          in.apart[at], in.apart[static_cast<std::size_t>(j)], weights);
  }
  for (std::int64_t i = 0; i < dim_; ++i) mean[i] += product(in.apart[static_cast<std::size_t>(i)], weights.shift);
}

KVKEEP_INLINE bool QueryStatistics::can_forget(std::int64_t tokens) const {
  return tokens <= pending_ + (count_ == 0 ? skipped_ : 0);
}

KVKEEP_INLINE void QueryStatistics::forget(std::int64_t tokens) {
  const std::int64_t counted = std::min<std::int64_t>(tokens, pending_);
  pending_ -= static_cast<std::int32_t>(counted);
  skipped_ -= tokens - counted;
}

KVKEEP_INLINE QueryMoments QueryStatistics::moments(std::int32_t head) const {
  QueryMoments all(dim_);
  all.count = count();
  const MomentsView view = this->view();
  if (count_ > 0) {
    memory_->read(all.mean.data(), view.mean + std::int64_t{head} * dim_, std::int64_t{dim_} * 8);
    memory_->read(all.second.data(), view.second + head * triangle(), triangle() * 8);
  }
  HeadWorkspace in(dim_);
  std::vector<float> queries(static_cast<std::size_t>(kBlock) * static_cast<std::size_t>(dim_));
  for (std::int64_t first = 0; first < pending_; first += kBlock) {
    const std::int64_t rows = std::min<std::int64_t>(kBlock, pending_ - first);
    for (std::int64_t i = 0; i < rows; ++i)
      memory_->read(queries.data() + i * dim_, newest(first + i) + std::int64_t{head} * dim_, std::int64_t{dim_} * 4);
    take_in(all.mean.data(), all.second.data(), count_ + first, head, queries.data(), dim_, rows, in);
  }
  return all;
}

KVKEEP_INLINE QueryStatistics::Held QueryStatistics::held() const {
  Held held{.heads = std::vector<QueryMoments>(static_cast<std::size_t>(heads_), QueryMoments(dim_)),
            .skipped = skipped_,
            .newest = std::vector<float>(static_cast<std::size_t>(pending_ * token_numbers()))};
  const MomentsView view = this->view();
  if (count_ > 0) {
    std::vector<double> numbers(static_cast<std::size_t>(heads_ * triangle() + token_numbers()));
    memory_->read(numbers.data(), view.second, std::ssize(numbers) * 8);  // means follow
    const double *second = numbers.data(), *mean = second + heads_ * triangle();
    for (QueryMoments& m : held.heads) {
      m.count = count_;
      m.second.assign(second, second + triangle());
      m.mean.assign(mean, mean + dim_);
      second += triangle(), mean += dim_;
    }
  }
  const std::int64_t whole = std::min<std::int64_t>(pending_, kMomentRing - begin_), rest = pending_ - whole;
  if (whole > 0) memory_->read(held.newest.data(), newest(0), whole * token_numbers() * 4);
  if (rest > 0) memory_->read(held.newest.data() + whole * token_numbers(), view.newest, rest * token_numbers() * 4);
  return held;
}

KVKEEP_INLINE void QueryStatistics::take(const Held& held) {
  const auto numbers = static_cast<std::size_t>(token_numbers()), tokens = held.newest.size() / numbers;
  const QueryMoments none(dim_);
  const bool fits = std::ranges::all_of(held.heads, [&](const QueryMoments& m) {
    return m.count >= 0 && m.count == held.heads.front().count && m.mean.size() == none.mean.size() &&
           m.second.size() == none.second.size();
  });
  KVKEEP_REQUIRE(fits && std::ssize(held.heads) == heads_ && held.skipped >= 0 &&
                     tokens * numbers == held.newest.size() && tokens <= kMomentRing,
                 "query statistics: ", held.heads.size(), " heads, ", held.newest.size(), " newest numbers, ",
                 held.skipped, " tokens left out; allowed ", heads_,
                 " heads that have counted the same tokens, and at most ", kMomentRing, " newest tokens of ", numbers,
                 " numbers");
  count_ = held.heads.front().count;
  skipped_ = held.skipped;
  begin_ = 0;
  pending_ = static_cast<std::int32_t>(tokens);
  std::vector<double> image;
  image.reserve(static_cast<std::size_t>(heads_ * triangle()) + numbers);
  for (const QueryMoments& m : held.heads) image.insert(image.end(), m.second.begin(), m.second.end());
  for (const QueryMoments& m : held.heads) image.insert(image.end(), m.mean.begin(), m.mean.end());
  const MomentsView view = this->view();
  if (count_ > 0) memory_->write(view.second, image.data(), std::ssize(image) * 8);
  if (pending_ > 0) memory_->write(view.newest, held.newest.data(), std::ssize(held.newest) * 4);
}

KVKEEP_INLINE std::int64_t QueryStatistics::bytes() const {
  const std::int64_t dim = dim_;
  return heads_ * dim * (4 * (dim + 3) + 4 * std::int64_t{kMomentRing});
}

}  // namespace kvkeep
