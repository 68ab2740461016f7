#pragma once
/// Folds: slots that an event drops may fold into spans, which attention still reads.

#include "kvkeep/observe/attended.h"
#include "kvkeep/parts/part.h"
#include "kvkeep/policy/folded_memory.h"

namespace kvkeep::parts {

/// Of keepers whose policy folds: keeper.part<parts::Folds>().
class Folds final : public Part {
 public:
  explicit Folds(const PartContext& context);

  /// Call it in every full layer of every step, once attention has run over the rows, with the arguments of observe()
  /// but queries after RoPE. Merges the folded spans of each sequence into `attended`, in place, so that both share one
  /// softmax. Does nothing if nothing was folded, and in other layers. Throws: InvalidArgument, before anything is
  /// written, for queries before RoPE, other shapes or dtypes; StateError on a device while a stream is captured. Cost:
  /// read_memory(). On a device it only launches, and returns counts of 0: what is opened is known there alone. The
  /// first layer of a step sends the tables of all layers, 112 bytes for every layer, sequence and KV head; later calls
  /// for the same tokens send nothing.
  ReadCounts view(const Observation& observation, const Attended& attended);

  /// The folded part of a sequence, in numbers.
  [[nodiscard]] FoldedState of(SequenceId sequence) const;
  /// The folded spans of one row. Throws Unsupported on a device. Valid until the next step.
  [[nodiscard]] const SpanRow& spans(SequenceId sequence, std::int32_t layer, std::int32_t head) const;
  /// [full layers * Hkv] What view() has counted in each layer and KV head, which sum up to Totals::reads; empty on a
  /// device.
  [[nodiscard]] std::span<const ReadCounts> reads() const { return memory_->reads(); }
  /// FoldedMemory::far_bytes().
  [[nodiscard]] std::int64_t far_bytes() const { return memory_->far_bytes(); }

  void join(SequenceId sequence) override;
  void leave(SequenceId sequence) noexcept override { folded_.remove(sequence); }
  void check_step(SequenceId sequence, const SequenceState& s) const override;
  void check_decision(const PartEvent& event) const override;
  void truncate(SequenceId sequence, const SequenceState& s) noexcept override;
  void reserve(const PartEvent& event) override;
  void abandon() noexcept override { folding_.reset(); }
  void settle(const PartEvent& event, std::size_t group) noexcept override;
  void report(Report& report) noexcept override;
#ifndef KVKEEP_HEADER_ONLY
  void save(SequenceId sequence, StateTensors& to) const override;
  void restore(SequenceId sequence, const SequenceState& s, const StateFile& state) override;
#endif

 private:
  struct Folded {
    std::unique_ptr<FoldedRows> rows = nullptr;
    std::vector<std::int64_t> viewed = {};  ///< [full layers] logical length when the layer last read its spans
  };
  void check_attended(const Observation& observation, const Attended& attended) const;

  std::unique_ptr<FoldedMemory> memory_;  ///< outlives the rows
  PerSequence<Folded> folded_;
  std::unique_ptr<Folding> folding_;   ///< between reserve() and report()
  std::vector<FoldedReader> readers_;  ///< scratch of view()
};

}  // namespace kvkeep::parts

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/parts/folds-inl.h"
#endif
