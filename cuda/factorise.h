// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Reduces rows of folded spans to few components, on a GPU: what kvkeep::fold() stores of them. No LibTorch in here.

#include <cstddef>
#include <cstdint>

#include "evidence.h"
#include "kvkeep/core/slot.h"
#include "kvkeep/memory/factors.h"
#include "stream.h"

namespace kvkeep::cuda {

/// Keys or values of one span and KV head. Pointers are to the device.
struct RowMatrix {
  SlotAddress rows = {};                ///< of the cache
  const std::int32_t* slots = nullptr;  ///< i32 [length] slots of the span; null: the first ones
  std::int32_t length = 0;              ///< L; 0: nothing is written
  const float* weights = nullptr;       ///< f32 [length] with sum 1 (kvkeep::span_weights()); null: all equal
  std::int64_t offset = 0;              ///< of its numbers in FactoriseArguments::factors
};

/// The result: kvkeep::SpanFactors.
struct FactorsFound {
  std::int32_t rank = 0;
  bool raw = false;
  bool centred = false;
  bool finite = true;  ///< false: it holds NaN or infinity, and nothing else was written
};

/// One linear layer of kvkeep::RankGates.
struct GateLayer {
  const float* weights = nullptr;  ///< f32 [outputs, inputs]
  const float* biases = nullptr;   ///< f32 [outputs]
  std::int32_t inputs = 0, outputs = 0;
};

/// kvkeep::RankGates on the device.
struct FactorGates {
  GateLayer layers[3] = {};
  float* key_means = nullptr;  ///< f32 [count, D] of the keys of the same spans and heads
  bool of_keys = false;        ///< the matrices are these keys: writes key_means; else reads what they have written

  /// That go in and come out of the layers; 0: there are no gates.
  [[nodiscard]] KVKEEP_HD std::int64_t numbers() const {
    return std::int64_t{layers[0].inputs} + layers[0].outputs + layers[1].outputs + layers[2].outputs;
  }
};

struct FactoriseArguments {
  const RowMatrix* matrices = nullptr;  ///< [count]
  std::int32_t count = 0;
  std::int32_t longest = 0;        ///< length of the longest, or more
  std::int32_t dim = 0;            ///< D, 1 to 256
  Element element = Element::f32;  ///< of the rows: f32, f16 or bf16
  Element store = Element::f32;    ///< of what is written: the same
  FactorOptions options = {};      ///< without sketches; `store` above says how they are written
  FactorsFound* found = nullptr;   ///< [count]
  std::byte* coarse = nullptr;     ///< store [count, D] weighted means
  std::byte* factors = nullptr;    ///< store: A [L, r], then B [r, D], or the rows if raw, at RowMatrix::offset;
                                   ///< room for factor_numbers()
  FactorGates gates = {};          ///< by Rank::gates
};

/// Most numbers that a matrix takes.
[[nodiscard]] std::int64_t factor_numbers(std::int64_t length, std::int64_t dim, const FactorOptions& options);

/// Shared memory of a block, in bytes, for matrices of up to `longest` rows: more than 99 KiB where both sides are
/// above 104, and then more than some chips have (GeForce RTX 30 to 50). gate_numbers: FactorGates::numbers().
[[nodiscard]] std::size_t factorise_shared_bytes(std::int32_t longest, std::int32_t dim, std::int64_t gate_numbers = 0);

/// One launch, one block per matrix: of a warp if no side is longer than 16, of 256 threads above 64. Lengths in one
/// launch should be similar. Decomposes the Gram matrix of the shorter side, m = min(L, D) up to 128, by cyclic Jacobi
/// rotations in shared memory; the other side of the factors, and the scale of a component, is the projection of the
/// rows. Agrees with the CPU, which decomposes in f64: the product of the factors to 1e-3 of the rows; ranks and
/// centring unless a rule is met within 1e-4 of the squares. It ends after 16 sweeps at most. Cost: m^2 max(L, D) / 2
/// products, some sweeps of 2 m^3 each (both twice if centring is automatic, three times if rows stay uncentred),
/// 2 r L D for r components. Shared memory 8 m (m + 1) bytes. Throws InvalidArgument for sizes below 0, a head
/// size outside 1 to 256, a rank below 1, an energy outside 0 to 1 and other dtypes; Unsupported if both L and D are
/// above 128.
void launch_factorise(const FactoriseArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
