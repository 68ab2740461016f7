#pragma once
/// Errors. Every message reads "operation: what is wrong; given X; allowed Y" and is thrown before anything is written.

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "kvkeep/core/text.h"

namespace kvkeep {

/// What kind of error, as a number; C's statuses (kvkeep/c.h) are the same.
enum class ErrorCode : std::int32_t {
  invalid_argument = 1,
  state = 2,
  unsupported = 3,
  device = 4,
  other = 6,  ///< a full disk, a closed pipe
  rank = 7,
};

/// Base of everything kvkeep throws.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& what) : Error(ErrorCode::other, what) {}
  [[nodiscard]] ErrorCode code() const noexcept { return code_; }

 protected:
  Error(ErrorCode code, const std::string& what) : std::runtime_error(what), code_(code) {}

 private:
  ErrorCode code_;
};

/// The caller passed something that is not allowed: an option, a shape, a dtype, a file.
class InvalidArgument : public Error {
 public:
  explicit InvalidArgument(const std::string& what) : Error(ErrorCode::invalid_argument, what) {}
};

/// A call that does not fit what happened before: an unknown sequence, a step out of order.
class StateError : public Error {
 public:
  explicit StateError(const std::string& what) : Error(ErrorCode::state, what) {}
};

/// A valid request that this build has no kernel for.
class Unsupported : public Error {
 public:
  explicit Unsupported(const std::string& what) : Error(ErrorCode::unsupported, what) {}
};

/// The device failed.
class DeviceError : public Error {
 public:
  explicit DeviceError(const std::string& what) : Error(ErrorCode::device, what) {}
};

/// Ranks that decide together could not: one of them failed, died or did not answer in time.
class RankError : public Error {
 public:
  explicit RankError(const std::string& what) : Error(ErrorCode::rank, what) {}
};

/// Throws `E` with the joined parts, escaped: a sentence is one line, whatever a file or a command line put into it.
template <class E = InvalidArgument, class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void refuse(const Parts&... parts) {
  throw E(escaped(text(parts...)));
}

}  // namespace kvkeep

/// KVKEEP_REQUIRE_AS(E, ok, parts...): throws `E` with the joined parts unless `ok`. A macro, so that the parts are
/// evaluated only when it throws: checks are on the path of every step.
#define KVKEEP_REQUIRE_AS(E, ok, ...)   \
  do {                                  \
    if (!(ok)) [[unlikely]]             \
      ::kvkeep::refuse<E>(__VA_ARGS__); \
  } while (false)

/// The same for arguments of the caller: throws InvalidArgument.
#define KVKEEP_REQUIRE(ok, ...) KVKEEP_REQUIRE_AS(::kvkeep::InvalidArgument, ok, __VA_ARGS__)

namespace kvkeep {

/// Throws InvalidArgument "operation: one; two; three" unless `problems` is empty.
inline void require_no_problems(std::string_view operation, const std::vector<std::string>& problems) {
  std::string all;
  for (const std::string& one : problems) all += (all.empty() ? "" : "; ") + one;
  KVKEEP_REQUIRE(all.empty(), operation, ": ", all);
}

}  // namespace kvkeep
