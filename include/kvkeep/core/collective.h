#pragma once
/// What ranks of one model need of each other. The engine gives it: a process group, an MPI communicator, threads.

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvkeep {

/// Ranks 0 to size() - 1. All of them make the same calls in the same order; one call at a time.
class Collective {
 public:
  virtual ~Collective() = default;
  [[nodiscard]] virtual std::int32_t rank() const = 0;
  [[nodiscard]] virtual std::int32_t size() const = 0;

  /// Fills `all` with the bytes of every rank, in the order of ranks: size() times as many as `mine`, whose size is the
  /// same on every rank. Returns once they are there. Throws RankError if a rank has died, fails, or does not answer
  /// within a time that the collective sets; its later calls may then throw too.
  virtual void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) = 0;
};

}  // namespace kvkeep
