// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What every reader of an engine's queries checks before it reads them.

#include "kvkeep/core/error.h"
#include "kvkeep/observe/observation.h"
#include "kvkeep/policy/policy.h"

namespace kvkeep {

/// Queries of a layer's new tokens, as a keeper of this policy reads them. Throws InvalidArgument for any other.
inline void check_queries(const char* operation, const Observation& o, const ModelSpec& spec, Device there,
                          const KVPolicy& policy) {
  const Tensor& q = o.queries;
  const std::int32_t tokens = o.indptr.back();
  KVKEEP_REQUIRE(q.defined(), operation, ": layer ", o.layer, " has no queries; policy ", policy.name(), " needs ",
                 policy.needs().queries > 0 ? text("the last ", policy.needs().queries, " of every full layer")
                                            : "those of prompts");
  KVKEEP_REQUIRE(q.dim() == 3 && q.size(0) == tokens && q.size(1) == spec.query_heads && q.size(2) == spec.key_dim,
                 operation, ": queries of layer ", o.layer, " have shape ", q.sizes(), "; allowed [", tokens, ", ",
                 spec.query_heads, ", ", spec.key_dim, "]");
  KVKEEP_REQUIRE(q.has_memory(), operation, ": queries of layer ", o.layer,
                 " have no address (null); allowed an address");
  KVKEEP_REQUIRE(is_scorable(q.dtype()), operation, ": queries of layer ", o.layer, " are ", q.dtype(),
                 "; allowed f32, f16, bf16");
  KVKEEP_REQUIRE(q.stride(2) == 1 || spec.key_dim == 1, operation, ": queries of layer ", o.layer, " have stride ",
                 q.stride(2), " in the last dimension; allowed 1");
  KVKEEP_REQUIRE(q.device() == there, operation, ": queries of layer ", o.layer, " are on ", q.device().str(),
                 ", but the keeper works on ", there.str(), "; allowed only that device");
}

/// The same for their log-sum-exps, if there are any.
inline void check_normalisers(const char* operation, const Observation& o, const ModelSpec& spec, Device there) {
  const Tensor& x = o.log_sum_exp;
  if (!x.defined()) return;
  KVKEEP_REQUIRE(x.has_memory(), operation, ": log-sum-exps of layer ", o.layer,
                 " have no address (null); allowed an address");
  KVKEEP_REQUIRE(x.dtype() == Dtype::f32 && x.dim() == 2 && x.size(0) == o.indptr.back() &&
                     x.size(1) == spec.query_heads && x.device() == there,
                 operation, ": log-sum-exps of layer ", o.layer, " are ", x.dtype(), " ", x.sizes(), " on ",
                 x.device().str(), "; allowed f32 [", o.indptr.back(), ", ", spec.query_heads, "] on ", there.str());
}

/// Throws InvalidArgument for queries before RoPE if the model spec leaves open the RoPE of a layer (-1: of none).
inline void check_basis(const char* operation, QueryBasis basis, std::int32_t without_rope) {
  KVKEEP_REQUIRE(basis != QueryBasis::pre_rope || without_rope < 0, operation,
                 ": queries are taken before RoPE, but the model spec does not state the RoPE of layer ", without_rope,
                 " that turns them; allowed with rope.inv_freq, RopeStyle::none for a layer without RoPE, or "
                 "QueryBasis::post_rope");
}

}  // namespace kvkeep
