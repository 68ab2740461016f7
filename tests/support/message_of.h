// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What an error says.

#include <gtest/gtest.h>

#include <exception>
#include <string>

#include "kvkeep/core/error.h"

namespace kvkeep::testing {

/// What `call` throws says; the test fails unless that is an E.
template <class E = Error>
std::string message_of(auto&& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "threw something else: " << error.what();
    return {};
  }
  ADD_FAILURE() << "threw nothing";
  return {};
}

}  // namespace kvkeep::testing
