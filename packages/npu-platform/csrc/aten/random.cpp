// Random numbers in bulk, on all cores: each comes of its place and of one number that is drawn from the device's generator.
//
// The rest of torch's distributions run their CPU kernels, one number after the other from the generator; that takes 25 ns each,
// and sampling asks for one exponential number for each word of the vocabulary and each row.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Dispatch.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <bit>
#include <mutex>

#include "aten/alias.h"
#include "runtime/device.h"
#include "runtime/driver.h"
#include "runtime/generator.h"
#include "runtime/launch.h"

namespace npu {
namespace {

using at::Tensor;
using std::optional;

constexpr int kLanes = 2;  // as many as any processor of this library has
typedef double Doubles __attribute__((vector_size(8 * kLanes)));
typedef uint64_t Words __attribute__((vector_size(8 * kLanes)));

// SplitMix64 (Steele, Lea, Flood 2014): the i-th number of the sequence that starts at `seed`.
uint64_t random_word(uint64_t seed, uint64_t i) {
  uint64_t z = seed + (i + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// Natural logarithm of normal numbers, relative error below 1e-10: m 2^e with m between 1 and 2 halved above the root of 2, and the
// series of the inverse hyperbolic tangent. Written out, because that of the C library takes one number at a time.
Doubles logarithm(Doubles x) {
  constexpr uint64_t kOne = 0x3ff0000000000000u, kRoot = 0x3ff6a09e667f3bcdu, kMagic = 0x4330000000000000u;  // 1, sqrt 2, 2^52
  const Words bits = std::bit_cast<Words>(x);
  const Words mantissa = (bits & 0x000fffffffffffffu) | kOne;
  const Words above = std::bit_cast<Words>(std::bit_cast<Doubles>(mantissa) > std::bit_cast<double>(kRoot)) & 0x0010000000000000u;
  const Doubles m = std::bit_cast<Doubles>(mantissa - above);
  const Doubles e = std::bit_cast<Doubles>(((bits + above) >> 52) | kMagic) - (0x1p52 + 1023);
  const Doubles s = (m - 1) / (m + 1), q = s * s;
  const Doubles series = 1 + q * (1. / 3 + q * (1. / 5 + q * (1. / 7 + q * (1. / 9 + q * (1. / 11)))));
  return 2 * s * series + e * 0.693147180559945309417;
}

// kLanes numbers from the i-th on: minus the logarithm of uniform ones, which are odd multiples of 2^-52 and so never 0 or 1.
Doubles exponentials(uint64_t seed, uint64_t i) {
  Words words;
  for (int lane = 0; lane < kLanes; ++lane) words[lane] = random_word(seed, i + uint64_t(lane)) >> 12 | 0x3ff0000000000001u;
  return -logarithm(2 - std::bit_cast<Doubles>(words));
}

template <class T>
struct Exponential {
  T* out;
  int64_t count;
  double scale;
  uint64_t seed;

  void operator()(int64_t begin, int64_t end) const {
    for (int64_t i = begin * kLanes; i < end * kLanes; i += kLanes) {
      const Doubles values = exponentials(seed, uint64_t(i)) * scale;
      const int lanes = int(std::min<int64_t>(kLanes, count - i));
      for (int lane = 0; lane < lanes; ++lane) out[i + lane] = static_cast<T>(values[lane]);
    }
  }
};

template <class T>
void fill(Exponential<T> fill) {
  parallel_for(0, (fill.count + kLanes - 1) / kLanes, 4096, [](void* f, int64_t begin, int64_t end) { (*static_cast<Exponential<T>*>(f))(begin, end); },
               &fill);
}

at::Generator cpu_generator(const optional<at::Generator>& generator, c10::DeviceIndex device) {
  if (!generator || !generator->defined()) return cpu_generator_of(default_generator(device));
  TORCH_CHECK(generator->device().type() == kNpu, "Expected a 'npu' device type for generator but found '", generator->device().type(),
              "' (in aten::exponential_)");
  return cpu_generator_of(*generator);
}

Tensor& exponential(Tensor& self, double lambda, optional<at::Generator> generator) {
  TORCH_CHECK(self.device().type() == kNpu, "Expected a '", self.device().type(),
              "' device type for generator but found 'npu' (in aten::exponential_)");
  TORCH_CHECK(lambda > 0.0, "exponential_ expects lambda > 0.0, but found lambda=", lambda);
  TORCH_CHECK(at::isFloatingType(self.scalar_type()), "exponential_ expects a floating-point tensor, but found ", self.scalar_type());
  const at::Generator numbers = cpu_generator(generator, self.device().index());
  if (self.numel() == 0) return self;
  if (!self.is_contiguous()) {
    Tensor dense = at::empty_like(self, at::MemoryFormat::Contiguous);
    return self.copy_(exponential(dense, lambda, generator));
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, self.scalar_type(), "exponential_", [&] {
    // drawn in the kernel: each replay of a graph draws anew
    launch(self.device().index(), "aten::exponential_",
           [out = self.mutable_data_ptr<scalar_t>(), count = self.numel(), scale = 1 / lambda, numbers] {
             auto* drawn = at::check_generator<at::CPUGeneratorImpl>(numbers);
             const uint64_t seed = [&] {
               std::lock_guard lock(drawn->mutex_);
               return drawn->random64();
             }();
             fill<scalar_t>({out, count, scale, seed});
           });
  });
  note_result_of_kernel(self);
  return self;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("exponential_", exponential); }

}  // namespace npu
