// What this machine can do: answers "dram SECONDS best" with the seconds that a byte takes to come from memory, at the best
// of 1, 2, 4 and 8 streams a thread, and "fma SECONDS best" with those of one operation of fused multiply-adds in registers,
// both on all threads (OMP_NUM_THREADS). "median" in place of "best": of the samples, where "best" is the fastest one.
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#else
constexpr int kWidth = 8;
#endif
typedef float Vector __attribute__((vector_size(4 * kWidth)));
typedef uint64_t Words __attribute__((vector_size(4 * kWidth)));

constexpr size_t kBytes = size_t{1} << 29, kPiece = size_t{1} << 25;

// With one thread its own time, which a busy machine does not lengthen.
bool alone = false;

double now() {
  if (alone) {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Of many short samples in which all threads work at once: the fastest, or the median.
double sampled(double seconds, bool median, int threads, const std::function<void(int thread, int sample)>& work) {
  std::vector<double> samples;
  double until = 0, began = 0;
  bool more = true;
  int sample = 0;
  std::barrier gate(threads, [&]() noexcept {
    const double t = now();
    if (sample > 0) samples.push_back(t - began);
    if (sample == 0) until = t + seconds;
    more = t < until || sample < 3;
    ++sample;
    began = now();
  });
  std::vector<std::thread> crew;
  for (int i = 0; i < threads; ++i)
    crew.emplace_back([&, i] {
      for (gate.arrive_and_wait(); more; gate.arrive_and_wait()) work(i, sample);
    });
  for (std::thread& t : crew) t.join();
  const auto wanted = median ? samples.begin() + static_cast<std::ptrdiff_t>(samples.size() / 2) : samples.begin();
  std::nth_element(samples.begin(), wanted, samples.end());
  return *wanted;
}

// What a thread reads of a piece in so many streams: no power of two apart, or they would meet in one set of the cache.
template <int kStreams>
struct Streams {
  static constexpr size_t kStep = 4 * sizeof(Words);

  static size_t each(size_t bytes) { return (bytes / kStreams / kStep - 5) * kStep; }

  static uint64_t read(const char* p, size_t bytes) {
    const size_t part = each(bytes);
    Words sums[4] = {};
    for (size_t i = 0; i < part; i += kStep)
      for (int s = 0; s < kStreams; ++s) {
        const char* at = p + s * part + i;
        for (size_t line = 0; line < kStep; line += 64) __builtin_prefetch(at + 1024 + line);
        for (int j = 0; j < 4; ++j) {
          Words w;
          std::memcpy(&w, at + j * sizeof(Words), sizeof w);
          sums[j] ^= w;
        }
      }
    const Words all = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
    return all[0] ^ all[1];
  }
};

constexpr int kChains = 12, kSteps = 1 << 16;

// Chains that start apart, so that the compiler cannot see one in two of them.
float multiply(const float* start) {
  Vector acc[kChains];
#pragma GCC unroll 12
  for (int j = 0; j < kChains; ++j) acc[j] = Vector{} + start[j];
  const Vector a = Vector{} + start[kChains], b = Vector{} + start[kChains + 1];
  for (int i = 0; i < kSteps; ++i)
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) acc[j] = acc[j] * b + a;
  Vector sum = {};
#pragma GCC unroll 12
  for (int j = 0; j < kChains; ++j) sum += acc[j];
  return sum[0];
}

}  // namespace

int main() {
  const char* wanted = std::getenv("OMP_NUM_THREADS");
  const int threads = wanted ? std::atoi(wanted) : static_cast<int>(std::thread::hardware_concurrency());
  alone = threads == 1;
  char* data = static_cast<char*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (data == MAP_FAILED) return 1;
  madvise(data, kBytes, MADV_HUGEPAGE);
  std::memset(data, 1, kBytes);
  std::vector<uint64_t> sinks(threads * 8);
  std::vector<float> numbers(kChains + 2);
  for (int j = 0; j < kChains + 2; ++j) numbers[j] = 1.f / static_cast<float>(j + 2);
  char what[16], which[16];
  double seconds;
  while (std::scanf("%15s %lf %15s", what, &seconds, which) == 3) {
    const bool median = !std::strcmp(which, "median");
    double answer;
    if (!std::strcmp(what, "dram")) {
      const auto read = [&]<int kStreams>() {
        const size_t share = kPiece / threads;
        const double took = sampled(seconds / 4, median, threads, [&](int thread, int sample) {
          const size_t piece = static_cast<size_t>(sample) * kPiece % kBytes;
          sinks[thread * 8] += Streams<kStreams>::read(data + piece + thread * share, share);
        });
        return took / static_cast<double>(threads * kStreams * Streams<kStreams>::each(share));
      };
      answer = std::min({read.operator()<1>(), read.operator()<2>(), read.operator()<4>(), read.operator()<8>()});
    } else {
      const double flops = 2.0 * kWidth * kChains * kSteps * threads;
      answer = sampled(seconds, median, threads, [&](int thread, int) {
        sinks[thread * 8] += static_cast<uint64_t>(multiply(numbers.data()));
      }) / flops;
    }
    std::printf("RESULT %.6e\n", answer);
    std::fflush(stdout);
  }
  return 0;
}
