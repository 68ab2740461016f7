#pragma once
/// New queries of one layer go to the rings of their sequences, all sequences of a step in one launch. Same layout as kvkeep::QueryRing. No LibTorch in here.

#include <cstddef>
#include <cstdint>

#include "stream.h"

namespace kvkeep::cuda {

/// Tokens of one sequence at consecutive positions.
struct QueryPiece {
  const std::byte* from = nullptr;     ///< [tokens, Hq, D] with the strides of the arguments
  std::byte* ring = nullptr;           ///< [capacity, Hq, D] packed
  std::int32_t* positions = nullptr;   ///< i32 [capacity]
  std::int32_t capacity = 0;           ///< tokens of the ring
  std::int32_t at = 0;                 ///< place of the first token in it, below capacity
  std::int32_t tokens = 0;             ///< at most capacity
  std::int32_t position = 0;           ///< logical, of the first token
};

inline constexpr std::int32_t kQueryPieces = 64;  ///< of one launch: they travel with it, so that nothing is copied before

struct PushQueriesArguments {
  QueryPiece pieces[kQueryPieces];
  std::int32_t count = 0;
  std::int32_t heads = 0;
  std::int64_t head_bytes = 0;         ///< D elements
  std::int64_t token_stride = 0;       ///< bytes, of `from`
  std::int64_t head_stride = 0;        ///< bytes, of `from`
};

/// One launch, a block a token. Cost: the bytes of the queries, read and written once in words of up to 16 bytes.
void launch_push_queries(const PushQueriesArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
