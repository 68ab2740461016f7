#pragma once
/// Errors. Every message reads "operation: what is wrong; given X; allowed Y" and is thrown before anything is written.

#include <sstream>
#include <stdexcept>
#include <string>

namespace kvkeep {

/// Everything kvkeep throws.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The caller gave something that is not allowed: an option, a shape, a dtype, a file.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// A valid wish that this build has no kernel for.
class Unsupported : public Error {
 public:
  using Error::Error;
};

/// The device failed.
class DeviceError : public Error {
 public:
  using Error::Error;
};

/// A call that does not fit what happened before: an unknown sequence, a step out of order.
class StateError : public Error {
 public:
  using Error::Error;
};

/// Joins its arguments with `operator<<`.
template <class... Parts>
[[nodiscard]] std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return std::move(out).str();
}

/// Throws `E` with the joined parts.
template <class E = InvalidArgument, class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  throw E(text(parts...));
}

/// Throws `E` with the joined parts unless `ok`.
template <class E = InvalidArgument, class... Parts>
void require(bool ok, const Parts&... parts) {
  if (!ok) refuse<E>(parts...);
}

}  // namespace kvkeep
