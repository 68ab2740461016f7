// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Sequences that begin as copies of others, on the CPU or on a device: they go on as if they had run their tokens
/// themselves.

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <ostream>
#include <utility>
#include <vector>

#include "engines.h"
#include "message_of.h"

namespace kvkeep::engines {

/// A policy to run an engine under, by a name that tests have.
struct EngineCase {
  const char* name;
  const char* policy;
  bool ragged = false;
};
inline void PrintTo(const EngineCase& one, std::ostream* out) { *out << one.name; }

/// `accelerator`: of the device that has the cache; null: the CPU.
inline std::unique_ptr<Engine> engine_of(const EngineCase& one, bool paged, PageLayout layout,
                                         std::shared_ptr<Machine> accelerator = nullptr) {
  if (!paged) return std::make_unique<DenseEngine>(one.policy, one.ragged, Dtype::f32, std::move(accelerator));
  return std::make_unique<PagedEngine>(one.policy, one.ragged, Dtype::f32, 4, layout, Form::apart, 1600,
                                       std::move(accelerator));
}

/// The numbers of one sequence, given to each of `ids`.
inline Numbers for_each(const Numbers& one, const std::vector<SequenceId>& ids) {
  Numbers all;
  const std::int32_t tokens = one.indptr.back();
  for (const SequenceId id : ids) all.ids.push_back(id), all.indptr.push_back(all.indptr.back() + tokens);
  const auto repeated = [&](const Array& side) {
    Array many = Array::empty({side.size(0) * std::ssize(ids), side.size(1), side.size(2)}, side.dtype());
    for (std::int64_t i = 0; i < std::ssize(ids); ++i) many.narrow(0, i * tokens, tokens).copy_(side);
    return many;
  };
  for (std::size_t l = 0; l < one.keys.size(); ++l) {
    all.keys.push_back(repeated(one.keys[l]));
    all.values.push_back(repeated(one.values[l]));
    all.queries.push_back(repeated(one.queries[l]));
  }
  return all;
}

/// What the engine gives a copy: the same pages, or rows of its own. `tokens`: of its rows, none of which was cut;
/// 0: all.
inline void share_rows(Engine& engine, SequenceId child, SequenceId parent, std::int32_t tokens = 0) {
  engine.lengths[child] = engine.lengths.at(parent);
  if (tokens > 0) engine.lengths[child].assign(kRows, tokens);
  if (auto* const paged = dynamic_cast<PagedEngine*>(&engine)) {
    tokens > 0 ? paged->sequences.fork(child, parent, tokens) : paged->sequences.fork(child, parent);
    return;
  }
  for (std::int32_t r = 0; r < kRows; ++r)
    for (std::int32_t t = 0; t < engine.lengths.at(child)[static_cast<std::size_t>(r)]; ++t)
      for (const Sided side : kAllSides)
        engine.slot_of(child, r / kHeads, r % kHeads, t, side)
            .copy_(engine.slot_of(parent, r / kHeads, r % kHeads, t, side));
}

/// Rows, positions and credit of two sequences of one keeper: the same bits.
inline void expect_same_sequences(const Engine& engine, SequenceId one, SequenceId other) {
  ASSERT_EQ(engine.lengths.at(one), engine.lengths.at(other));
  ASSERT_EQ(engine.keeper.logical_length(one), engine.keeper.logical_length(other));
  ASSERT_EQ(engine.keeper.prompt_length(one), engine.keeper.prompt_length(other));
  const Engine::OnHost here(engine);
  for (std::int32_t r = 0; r < kRows; ++r) {
    const std::int32_t l = r / kHeads, h = r % kHeads;
    const auto of = [&](SequenceId id) {
      const auto positions = engine.keeper.positions(id, l, h);
      const auto credit = engine.keeper.credit(id, l, h);
      return std::pair(Ints(positions.begin(), positions.end()), std::vector<float>(credit.begin(), credit.end()));
    };
    ASSERT_EQ(of(one), of(other)) << "row " << r;
    for (std::int32_t t = 0; t < engine.lengths.at(one)[static_cast<std::size_t>(r)]; ++t)
      for (const Sided side : kAllSides)
        ASSERT_TRUE(same_bits(engine.slot_of(one, l, h, t, side), engine.slot_of(other, l, h, t, side)))
            << "row " << r << ", slot " << t;
  }
}

/// All of them get the same tokens for some steps, and stay alike.
inline void expect_go_on_alike(Engine& engine, oracle::Random& random, const std::vector<SequenceId>& ids, int steps) {
  const std::int64_t cut = engine.keeper.totals().sequences_cut;
  for (int i = 0; i < steps; ++i) {
    engine.step(for_each(numbers_of(random, {{0, 1 + i % 2}}), ids));
    for (const SequenceId id : ids)
      ASSERT_NO_FATAL_FAILURE(expect_same_sequences(engine, ids.front(), id)) << "sequence " << id << ", step " << i;
  }
  EXPECT_GE(engine.keeper.totals().sequences_cut, cut + 2 * std::ssize(ids)) << "no event tested it";
}

/// A sequence that was cut and decodes is copied twice, at once and from a copy, as n samples of one prompt are.
inline void expect_forks_go_on(Engine& engine) {
  oracle::Random random(7);
  engine.join(1);
  engine.step(numbers_of(random, {{1, 70}}));
  for (int i = 0; i < 21; ++i) engine.step(numbers_of(random, {{1, 1}}));
  ASSERT_GT(engine.keeper.totals().events, 0);
  engine.keeper.fork(2, 1);
  share_rows(engine, 2, 1);
  engine.keeper.fork(3, 2);
  share_rows(engine, 3, 2);
  ASSERT_NO_FATAL_FAILURE(expect_go_on_alike(engine, random, {1, 2, 3}, 30));
  engine.keeper.leave(1);  // nothing of it is the others'
  ASSERT_NO_FATAL_FAILURE(expect_go_on_alike(engine, random, {2, 3}, 30));
}

/// Four ways to begin with the first tokens of a prompt that another request has: a copy of it while it is served, the
/// state that was saved beside its pages, the first tokens of one that was saved later, and running them.
inline void expect_prefix_hits_score_as_if_run(Engine& engine) {
  constexpr std::int32_t kPrefix = 48, kPrompt = 70;
  oracle::Random random(8);
  const Numbers prefix = numbers_of(random, {{0, kPrefix}}), rest = numbers_of(random, {{0, kPrompt - kPrefix}});
  for (const SequenceId id : {SequenceId{1}, SequenceId{4}})
    engine.keeper.join(id, 0, kOpenPrompt), engine.lengths[id] = Ints(kRows, 0);
  engine.keeper.join(5, 0, kPrompt), engine.lengths[5] = Ints(kRows, 0);
  engine.step(for_each(prefix, {1, 4, 5}));
  const std::vector<std::byte> state = engine.keeper.save(1);
  engine.step(for_each(numbers_of(random, {{0, 9}}), {1, 4}));  // the donors go on, and one is taken back

  engine.keeper.restore(2, state, kPrompt);
  share_rows(engine, 2, 1, kPrefix);
  engine.keeper.fork(3, 1, kPrefix, kPrompt);
  share_rows(engine, 3, 1, kPrefix);
  engine.keeper.restore(6, engine.keeper.save(1), kPrompt, kPrefix);
  share_rows(engine, 6, 1, kPrefix);
  engine.keeper.leave(4);
  const std::vector<SequenceId> alike{2, 3, 5, 6};
  for (const SequenceId id : alike) ASSERT_EQ(engine.keeper.prompt_length(id), kPrompt);
  engine.step(for_each(rest, alike));
  for (const SequenceId id : alike) ASSERT_NO_FATAL_FAILURE(expect_same_sequences(engine, 5, id)) << id;
  ASSERT_NO_FATAL_FAILURE(expect_go_on_alike(engine, random, alike, 30));
}

}  // namespace kvkeep::engines
