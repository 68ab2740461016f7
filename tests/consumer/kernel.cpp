// SPDX-License-Identifier: Apache-2.0
// A kernel of an engine's own, which lives on fused multiply-adds.
void engine_axpy(float a, const float* x, float* y, int n) {
  for (int i = 0; i < n; ++i) y[i] += a * x[i];
}
