#include "distributed/shared_collectives.h"

#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "distributed/copies.h"
#include "distributed/reduce.h"

namespace npu {
namespace {

constexpr int kNone = -1;

ExchangeLabel label_of(const SharedCall& call, size_t bytes, int dtype = kNone, int op = kNone, int root = kNone) {
  ExchangeLabel label{{}, dtype, op, root, bytes};
  std::strncpy(label.collective, call.name, sizeof label.collective - 1);
  return label;
}

ExchangeLabel label_of(const SharedCall& call, const Reduction& what, int root = kNone) {
  return label_of(call, size_t(what.count) * c10::elementSize(what.dtype), int(what.dtype), int(what.op), root);
}

// The contributions of all ranks from `offset` on; this rank's own may also be read where it came from, which is nearer.
c10::SmallVector<const void*, 8> await_all(const SharedCall& call, size_t offset = 0, ConstBytes own = nullptr) {
  c10::SmallVector<const void*, 8> contributions;
  for (int rank = 0; rank < call.segment.size(); ++rank) {
    const bool is_own = own && rank == call.segment.rank();
    contributions.push_back(is_own ? own : call.segment.await(rank, call.deadline) + offset);
  }
  return contributions;
}

// piece(begin, end) over [0, total) in pieces of at most `step`; an empty collective is one empty piece.
template <class Piece>
void in_pieces(size_t total, size_t step, Piece piece) {
  size_t begin = 0;
  do {
    const size_t end = std::min(begin + step, total);
    piece(begin, end);
    begin = end;
  } while (begin < total);
}

// Begins an exchange with what this rank gives, as many bytes as the others.
void contribute(const SharedCall& call, const void* from, size_t bytes) {
  copy_into_slot(call.segment.begin(bytes, call.deadline), from, bytes);
}

size_t slot_elements(const Reduction& what) { return SharedSegment::kSlotBytes / c10::elementSize(what.dtype); }

// From so many bytes on, three ranks or more each sum a part for all of them: one would read all that the others have.
constexpr size_t kBytesInParts = size_t(32) << 10;

// Of an all-reduce of two ranks at a time: a rank's own part is still in its L2 when it is added to.
constexpr size_t kPieceBytes = size_t(256) << 10;

// What is gathered, from so many bytes on, goes past the caches, too: nobody would find its beginning there.
constexpr size_t kBytesPastCaches = size_t(8) << 20;

// So much of each part of an all-to-all goes with the sizes: a decode step's parts have no second exchange.
constexpr size_t kBytesWithSizes = size_t(64) << 10;

// A reduce-scatter and an all-gather. Each part is summed by one rank, in the order of the ranks, as in one exchange.
void all_reduce_in_parts(const SharedCall& call, const Reduction& what, Bytes data) {
  const size_t item = c10::elementSize(what.dtype), ranks = size_t(call.segment.size()), own = size_t(call.segment.rank());
  const ExchangeLabel label = label_of(call, what);
  in_pieces(size_t(what.count), slot_elements(what), [&](size_t begin, size_t end) {
    const size_t share = (end - begin + ranks - 1) / ranks;
    auto first = [&](size_t rank) { return std::min(rank * share, end - begin) * item; };
    const Bytes piece = data + begin * item;
    contribute(call, piece, (end - begin) * item);
    call.segment.arrive(label);
    const size_t bytes = first(own + 1) - first(own);
    const Bytes mine = piece + first(own);
    reduce(what.dtype, what.op, await_all(call, first(own), mine), mine, int64_t(bytes / item));
    copy_into_slot(call.segment.begin(share * item, call.deadline), mine, bytes);  // the last share may be shorter
    call.segment.arrive(label);
    for (size_t rank = 0; rank < ranks; ++rank) {
      if (rank != own) copy_bytes(piece + first(rank), call.segment.await(int(rank), call.deadline), first(rank + 1) - first(rank));
    }
  });
}

}  // namespace

void shared_all_reduce(const SharedCall& call, const Reduction& what, Bytes data) {
  const size_t item = c10::elementSize(what.dtype);
  if (call.segment.size() > 2 && size_t(what.count) * item >= kBytesInParts) return all_reduce_in_parts(call, what, data);
  const ExchangeLabel label = label_of(call, what);
  in_pieces(size_t(what.count), kPieceBytes / item, [&](size_t begin, size_t end) {
    const Bytes piece = data + begin * item;
    contribute(call, piece, (end - begin) * item);
    call.segment.arrive(label);
    reduce(what.dtype, what.op, await_all(call, 0, piece), piece, int64_t(end - begin));
  });
}

void shared_reduce(const SharedCall& call, const Reduction& what, Bytes data, int root) {
  const size_t item = c10::elementSize(what.dtype);
  const ExchangeLabel label = label_of(call, what, root);
  in_pieces(size_t(what.count), slot_elements(what), [&](size_t begin, size_t end) {
    contribute(call, data + begin * item, (end - begin) * item);
    call.segment.arrive(label);
    if (call.segment.rank() != root) return;
    reduce(what.dtype, what.op, await_all(call), data + begin * item, int64_t(end - begin));
  });
}

void shared_reduce_scatter(const SharedCall& call, const Reduction& what, c10::ArrayRef<ConstBytes> inputs, Bytes output) {
  const size_t item = c10::elementSize(what.dtype);
  const ExchangeLabel label = label_of(call, what);
  const size_t ranks = inputs.size();
  in_pieces(size_t(what.count), slot_elements(what) / ranks, [&](size_t begin, size_t end) {
    const size_t bytes = (end - begin) * item;
    Bytes slot = call.segment.begin(ranks * bytes, call.deadline);
    for (size_t rank = 0; rank < ranks; ++rank) copy_into_slot(slot + rank * bytes, inputs[rank] + begin * item, bytes);
    call.segment.arrive(label);
    reduce(what.dtype, what.op, await_all(call, size_t(call.segment.rank()) * bytes), output + begin * item,
           int64_t(end - begin));
  });
}

void shared_broadcast(const SharedCall& call, Bytes data, size_t bytes, int root) {
  const ExchangeLabel label = label_of(call, bytes, kNone, kNone, root);
  const bool is_root = call.segment.rank() == root;
  in_pieces(bytes, SharedSegment::kSlotBytes, [&](size_t begin, size_t end) {
    Bytes slot = call.segment.begin(end - begin, call.deadline);
    if (is_root) copy_into_slot(slot, data + begin, end - begin);
    call.segment.arrive(label);
    if (!is_root) copy_bytes(data + begin, call.segment.await(root, call.deadline), end - begin);
  });
}

void shared_all_gather(const SharedCall& call, ConstBytes input, c10::ArrayRef<Bytes> outputs, c10::ArrayRef<size_t> sizes) {
  const size_t longest = *std::max_element(sizes.begin(), sizes.end()), own = size_t(call.segment.rank());
  const ExchangeLabel label = label_of(call, longest);
  const bool in_place = outputs[own] == input, is_large = longest * sizes.size() >= kBytesPastCaches;
  const auto take = is_large ? copy_past_caches : copy_bytes;
  in_pieces(longest, SharedSegment::kSlotBytes, [&](size_t begin, size_t end) {
    auto length = [&](size_t rank) { return std::min(end, sizes[rank]) - std::min(begin, sizes[rank]); };
    const Bytes slot = call.segment.begin(end - begin, call.deadline);
    if (in_place || is_large) {
      copy_into_slot(slot, input + begin, length(own));
    } else {
      copy_into_slot_and_to(slot, outputs[own] + begin, input + begin, length(own));
    }
    call.segment.arrive(label);
    if (!in_place && is_large) copy_past_caches(outputs[own] + begin, input + begin, length(own));
    for (size_t rank = 0; rank < sizes.size(); ++rank) {
      if (rank != own) take(outputs[rank] + begin, call.segment.await(int(rank), call.deadline), length(rank));
    }
  });
}

void shared_gather(const SharedCall& call, ConstBytes input, c10::ArrayRef<Bytes> outputs, size_t bytes, int root) {
  const ExchangeLabel label = label_of(call, bytes, kNone, kNone, root);
  in_pieces(bytes, SharedSegment::kSlotBytes, [&](size_t begin, size_t end) {
    contribute(call, input + begin, end - begin);
    call.segment.arrive(label);
    if (call.segment.rank() != root) return;
    for (size_t rank = 0; rank < outputs.size(); ++rank) {
      copy_bytes(outputs[rank] + begin, call.segment.await(int(rank), call.deadline), end - begin);
    }
  });
}

void shared_scatter(const SharedCall& call, c10::ArrayRef<ConstBytes> inputs, Bytes output, size_t bytes, int root) {
  const ExchangeLabel label = label_of(call, bytes, kNone, kNone, root);
  const size_t ranks = size_t(call.segment.size()), own = size_t(call.segment.rank());
  in_pieces(bytes, SharedSegment::kSlotBytes / ranks, [&](size_t begin, size_t end) {
    const size_t part = end - begin;
    Bytes slot = call.segment.begin(ranks * part, call.deadline);
    for (size_t rank = 0; rank < inputs.size(); ++rank) copy_into_slot(slot + rank * part, inputs[rank] + begin, part);
    call.segment.arrive(label);
    copy_bytes(output + begin, call.segment.await(root, call.deadline) + own * part, part);
  });
}

void shared_all_to_all(const SharedCall& call, c10::ArrayRef<ConstBytes> inputs, c10::ArrayRef<size_t> given, c10::ArrayRef<Bytes> outputs,
                       c10::ArrayRef<size_t> taken) {
  const size_t ranks = inputs.size(), own = size_t(call.segment.rank());
  const ExchangeLabel label = label_of(call, 0);
  // The sizes first, and the beginning of each part with them: a rank knows its own sizes only, and all must make as many
  // exchanges as the longest part needs.
  const size_t head = ranks * sizeof(size_t), first = std::min(kBytesWithSizes, (SharedSegment::kSlotBytes - head) / ranks);
  Bytes slot = call.segment.begin(head + ranks * first, call.deadline);
  copy_bytes(slot, given.data(), head);
  for (size_t rank = 0; rank < ranks; ++rank) copy_into_slot(slot + head + rank * first, inputs[rank], std::min(given[rank], first));
  call.segment.arrive(label);
  size_t longest = 0;
  for (size_t rank = 0; rank < ranks; ++rank) {
    std::vector<size_t> theirs(ranks);
    copy_bytes(theirs.data(), call.segment.await(int(rank), call.deadline), head);
    TORCH_CHECK(theirs[own] == taken[rank], "npuccl: ", call.name, ": rank ", rank, " has ", theirs[own], " bytes for rank ", own,
                ", which expects ", taken[rank], ".");
    longest = std::max(longest, *std::max_element(theirs.begin(), theirs.end()));
  }
  for (size_t rank = 0; rank < ranks; ++rank) {
    copy_bytes(outputs[rank], call.segment.await(int(rank), call.deadline) + head + own * first, std::min(taken[rank], first));
  }
  if (longest <= first) return;
  in_pieces(longest - first, SharedSegment::kSlotBytes / ranks, [&](size_t begin, size_t end) {
    const size_t step = end - begin;
    auto from = [&](size_t size) { return std::min(first + begin, size); };
    auto length = [&](size_t size) { return std::min(first + end, size) - from(size); };
    Bytes next = call.segment.begin(ranks * step, call.deadline);
    for (size_t rank = 0; rank < ranks; ++rank) copy_into_slot(next + rank * step, inputs[rank] + from(given[rank]), length(given[rank]));
    call.segment.arrive(label);
    for (size_t rank = 0; rank < ranks; ++rank) {
      ConstBytes theirs = call.segment.await(int(rank), call.deadline) + own * step;
      copy_bytes(outputs[rank] + from(taken[rank]), theirs, length(taken[rank]));
    }
  });
}

void shared_barrier(const SharedCall& call) {
  call.segment.begin(0, call.deadline);
  call.segment.arrive(label_of(call, 0));
  await_all(call);
}

}  // namespace npu
