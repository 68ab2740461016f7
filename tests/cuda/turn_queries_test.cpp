// Window queries on a GPU: those of the CPU, turned at their own positions and scaled.

#include "turn_queries.h"

#include "evidence_case.h"

namespace kvkeep::cuda {
namespace {

using TurnQueries = OnDevice;

/// What the CPU reads, [groups, Hq, W, D]; zeros where a group holds fewer.
std::vector<float> on_cpu(const EvidenceCase& c, std::int32_t window) {
  std::vector<float> out;
  const std::size_t pairs = c.spec.rope.inv_freq.size();
  std::vector<float> cosines(pairs), sines(pairs), q(static_cast<std::size_t>(c.shape.dim));
  for (const RowGroup& group : c.table.groups)
    for (std::int32_t h = 0; h < c.spec.query_heads; ++h)
      for (std::int32_t i = group.queries.count - window; i < group.queries.count; ++i) {
        std::fill(q.begin(), q.end(), 0.0F);
        for (std::int32_t d = 0; i >= 0 && d < c.shape.dim; ++d) {
          const std::byte* at = group.queries.at(i, h) + d * element_bytes(c.shape.query);
          if (c.shape.query == Element::f16) q[static_cast<std::size_t>(d)] = *reinterpret_cast<const c10::Half*>(at);
          else if (c.shape.query == Element::bf16) q[static_cast<std::size_t>(d)] = *reinterpret_cast<const c10::BFloat16*>(at);
          else q[static_cast<std::size_t>(d)] = *reinterpret_cast<const float*>(at);
        }
        if (i >= 0 && c.shape.pre_rope) {
          rope_at(c.spec.rope, group.queries.position(i), cosines.data(), sines.data());
          rope_rotate(c.spec.rope.style, static_cast<std::int64_t>(pairs), cosines.data(), sines.data(), q.data());
        }
        for (float& x : q) x *= static_cast<float>(c.spec.scale());
        out.insert(out.end(), q.begin(), q.end());
      }
  return out;
}

TEST_F(TurnQueries, AreThoseOfTheCpu) {  // B16
  std::uint64_t seed = 0;
  for (const Element element : {Element::f32, Element::f16, Element::bf16})
    for (const bool pre_rope : {false, true})
      for (const RopeStyle style : {RopeStyle::half, RopeStyle::interleaved})
        for (const std::int32_t dim : {1, 7, 64, 96}) {
          const EvidenceCase c(++seed, {.group = 3, .kv_heads = 2, .dim = dim, .lengths = {40, 2, 9}, .seen = 5, .query = element, .pre_rope = pre_rope, .style = style, .pairs = dim / 4 + dim / 5});
          for (const std::int32_t window : {1, 4, 7}) {
            const std::vector<float> want = on_cpu(c, window);
            in_every_order([&] {
              const DeviceEvidence there(c);
              const DeviceArray<float> out(want.size());
              const DeviceArray<c10::BFloat16> rounded(want.size());
              TurnQueriesArguments arguments{.evidence = there.arguments(),
                                             .window = window,
                                             .inv_freq = there.inv_freq(),
                                             .pairs = pre_rope ? static_cast<std::int32_t>(c.spec.rope.inv_freq.size()) : 0,
                                             .style = style,
                                             .attention_scaling = c.spec.rope.attention_scaling,
                                             .element = Element::f32,
                                             .out = out.data()};
              launch_turn_queries(arguments, nullptr);
              arguments.element = Element::bf16;
              arguments.out = rounded.data();
              launch_turn_queries(arguments, nullptr);
              const std::vector<float> got = out.download();
              const std::vector<c10::BFloat16> half = rounded.download();
              for (std::size_t i = 0; i < want.size(); ++i) {
                ASSERT_NEAR(got[i], want[i], 1e-6) << "at " << i << "; " << c.description();
                ASSERT_EQ(static_cast<float>(half[i]), static_cast<float>(c10::BFloat16(got[i])));
              }
            });
          }
        }
}

TEST_F(TurnQueries, RefusesWhatItCannotTurn) {
  EXPECT_THROW(launch_turn_queries({.evidence = {.dim = 257}}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_turn_queries({.evidence = {.dim = 8}, .pairs = 5}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_turn_queries({.evidence = {.dim = 8, .query = Element::fp8_e4m3}}, nullptr), InvalidArgument);
  EXPECT_THROW(launch_turn_queries({.evidence = {.dim = 8}, .element = Element::f16}, nullptr), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::cuda
