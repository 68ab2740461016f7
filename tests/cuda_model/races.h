// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Races of the threads of a launch, found by what orders accesses and not by what comes of them.
///
/// Every thread has a clock, and every four bytes of memory that it touches remember who touched them when. An access
/// that another thread's does not precede, and one of the two writes, is a race, in whatever order they ran. What
/// orders, as the CUDA programming guide and PTX say, and no more than that:
///
/// - __syncthreads(): all threads of the block. __syncwarp(mask): the lanes of the mask.
/// - __threadfence(), then an atomic, and in another thread an atomic on the same address after it, then
///   __threadfence(): what precedes the first fence precedes what follows the second. Atomics alone order nothing, and
///   race with every access that is not atomic.
/// - A launch precedes the next one. Blocks of a launch are not ordered, though they run one after another.
/// - Shuffles, ballots, votes, reductions and matrix units order nothing.
/// - copy_ahead() writes at any time until its thread waits for it, as if by somebody whom nothing orders.
///
/// The compiler calls __tsan_read4() and the like before every access of the kernels (-fsanitize=thread), which are
/// here: nothing of ThreadSanitizer is linked.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace kvkeep::cuda::model {

/// What a thread has learned of a warp by a fence: accesses of the block before `floor`, and of its lanes before these
/// clocks, are over.
struct Known {
  std::uint32_t block = 0, warp = 0, floor = 0;
  std::array<std::uint32_t, 32> lanes{};
};
using Knowledge = std::vector<Known>;

/// A thread as this check knows it.
struct Watched {
  std::uint32_t block = 0, thread = 0;
  std::uint32_t clock = 1;                        ///< of its accesses from now on
  std::uint32_t floor = 1;                        ///< accesses of its block with a smaller clock are over
  std::array<std::uint32_t, 32> lanes{};          ///< and those of its warp's lanes with one smaller than these
  Knowledge acquired;                             ///< from other warps and blocks
  Knowledge observed;                             ///< by atomics; acquired with the next fence
  Knowledge released;                             ///< what its atomics hand on: what it knew at its last fence
  std::array<std::span<const std::byte>, 2> own;  ///< its stack and what the model has of it: nobody else's
};

/// The thread that runs a kernel's code; null in the model's own and on the host.
extern constinit thread_local Watched* watched;

/// Nothing is watched while it lives: for the model's own code in the middle of a kernel's.
class Quiet {
 public:
  Quiet() { watched = nullptr; }
  ~Quiet() { watched = before_; }
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;

 private:
  Watched* before_ = watched;
};

enum class Touch : std::uint8_t {
  read,
  write,
  atomic,   ///< reads and writes
  arrives,  ///< a copy that is under way writes
  arrived   ///< it has been waited for
};

/// The running thread touches memory, from the code at `code`.
void touch(const void* at, std::size_t bytes, Touch how, const void* code);
/// Of an atomic that also may hand on what its thread knew at its last fence, and observe what others did.
void touch_atomic(const void* at, std::size_t bytes, const void* code);
/// __threadfence() of the running thread.
void order_fence(Watched& thread);
/// __syncthreads() of all threads of a block.
void order_threads(std::span<Watched* const> block);
/// __syncwarp() of some lanes of a warp.
void order_lanes(std::span<Watched* const> lanes);

/// A launch begins: whatever was touched is over.
void forget_all();
/// This is memory of another block from now on.
void forget(const void* memory, std::size_t bytes);
/// What was found since forget_all(), as sentences; empty if nothing was.
[[nodiscard]] std::string races_found();

}  // namespace kvkeep::cuda::model
