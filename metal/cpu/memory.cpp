// The memory checker. Every load and store of a checked build arrives here before it happens, through the calls that
// clang's thread sanitizer inserts; its own runtime is not linked, this file is what those calls find.
//
// Each buffer lies alone in 4 GiB of reserved addresses, so that a wrong index is never inside another buffer. A cell
// per byte of threadgroup memory and of writable buffers remembers who wrote and read it last, and in which epoch:
// barriers count epochs, per kind of memory and for the threadgroup and the simdgroup apart. Two accesses of different
// threads, one of them a write, must have a barrier between them that covers that memory. This does not depend on
// the order in which the fibers happened to run.
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "state.h"

namespace {

constexpr size_t BUFFER_SPACE = size_t(1) << 32, PAGE = 4096 * 4, RED_ZONE = 64;
struct Declaration { int id; size_t offset, bytes; const char* name; };

char* region;  // MAX_BUFFERS times BUFFER_SPACE
char* arena;   // threadgroup memory
Cell arena_cells[ARENA_BYTES];
Declaration declarations[64];
int declaration_count;
size_t arena_top = ARENA_BYTES, arena_needed;  // used, and to be cleaned before the next threadgroup
void* image;  // where the kernel's own constants lie

// What one thread does to one byte.
struct Access { bool write, device; uint64_t pc; uint32_t epoch, simd_epoch; const char* name; size_t offset; };

bool write_precedes(const Cell& cell, const Access& access) {
  if (cell.write_group != runtime.group + 1) return !access.device;  // nothing orders threadgroups within a launch
  if (cell.write_thread == int(runtime.self().thread.index_in_group)) return true;
  if (cell.write_epoch < access.epoch) return true;
  return cell.write_thread / LANES == int(runtime.self().thread.simdgroup) && cell.write_simd_epoch < access.simd_epoch;
}

bool reads_precede(const Cell& cell, const Access& access) {
  if (cell.read_group != runtime.group + 1) return !access.device;
  if (cell.read_thread == int(runtime.self().thread.index_in_group)) return true;
  if (cell.read_epoch < access.epoch) return true;
  return cell.read_simdgroup == int(runtime.self().thread.simdgroup) && cell.read_simd_epoch < access.simd_epoch;
}

void note_write(Cell& cell, const Access& access) {
  if (cell.read_epoch && !reads_precede(cell, access)) {
    report(RACE, access.pc, 0, "race on '%s' byte %zu: this write and a read by %s %d have no barrier between them",
           access.name, access.offset, cell.read_thread < 0 ? "simdgroup" : "thread",
           cell.read_thread < 0 ? cell.read_simdgroup : cell.read_thread);
    cell.read_epoch = 0;
  }
  cell.write_epoch = access.epoch;
  cell.write_simd_epoch = access.simd_epoch;
  cell.write_group = runtime.group + 1;
  cell.write_thread = int16_t(runtime.self().thread.index_in_group);
  cell.written = 1;
}

void note_read(Cell& cell, const Access& access) {
  const GpuThread& me = runtime.self().thread;
  if (!cell.written) {
    report(UNINITIALISED, access.pc, 0, "read of '%s' byte %zu that nobody has written", access.name, access.offset);
    cell.written = 1;
  }
  if (cell.read_epoch != access.epoch || cell.read_group != runtime.group + 1) {
    cell.read_epoch = access.epoch;
    cell.read_simd_epoch = access.simd_epoch;
    cell.read_group = runtime.group + 1;
    cell.read_thread = int16_t(me.index_in_group);
    cell.read_simdgroup = int16_t(me.simdgroup);
  } else if (cell.read_simdgroup != int(me.simdgroup)) {
    cell.read_simdgroup = cell.read_thread = -1;
  } else if (cell.read_simd_epoch != access.simd_epoch) {
    cell.read_simd_epoch = access.simd_epoch;
    cell.read_thread = int16_t(me.index_in_group);
  } else if (cell.read_thread != int(me.index_in_group)) {
    cell.read_thread = -1;
  }
}

void note(Cell* cells, size_t bytes, Access access) {
  for (size_t i = 0; i < bytes; i++, access.offset++) {
    Cell& cell = cells[i];
    if (cell.write_epoch && !write_precedes(cell, access)) {
      report(RACE, access.pc, 0, "race on '%s' byte %zu: this %s and a write by thread %d%s have no barrier between them",
             access.name, access.offset, access.write ? "write" : "read", cell.write_thread,
             cell.write_group == runtime.group + 1 ? "" : " of another threadgroup");
      cell.write_epoch = 0;
    }
    if (access.write) note_write(cell, access); else note_read(cell, access);
  }
}

void threadgroup_access(size_t offset, size_t bytes, bool write, uint64_t pc) {
  const Declaration* nearest = nullptr;
  for (int i = 0; i < declaration_count; i++) {
    const Declaration& one = declarations[i];
    if (offset >= one.offset && offset + bytes <= one.offset + one.bytes) {
      (write ? runtime.counts.threadgroup_written : runtime.counts.threadgroup_read) += bytes;
      return note(arena_cells + offset, bytes,
                  Access{write, false, pc, runtime.epoch_threadgroup + 1, runtime.simdgroup().epoch_threadgroup + 1,
                         one.name, offset - one.offset});
    }
    if (!nearest || llabs((long long)(offset - one.offset)) < llabs((long long)(offset - nearest->offset))) nearest = &one;
  }
  report(OUT_OF_BOUNDS, pc, 0, "%s of %zu bytes outside threadgroup memory, nearest '%s' byte %lld of %zu",
         write ? "write" : "read", bytes, nearest ? nearest->name : "none",
         nearest ? (long long)(offset - nearest->offset) : 0, nearest ? nearest->bytes : 0);
  abandon_launch();
}

void buffer_access(uintptr_t address, size_t bytes, bool write, uint64_t pc) {
  const int i = int((address - uintptr_t(region)) / BUFFER_SPACE);
  Buffer& buffer = runtime.buffers[i];
  const size_t offset = address - buffer.base;
  if (i >= runtime.buffer_count || offset >= buffer.size || offset + bytes > buffer.size) {
    report(OUT_OF_BOUNDS, pc, 0, "%s of %zu bytes at byte %lld of buffer#%d, which has %zu", write ? "write" : "read",
           bytes, (long long)(address - buffer.base), i, buffer.size);
    abandon_launch();
  }
  if (write && !buffer.writable) {
    report(READ_ONLY, pc, 0, "write to the input buffer#%d", i);
    abandon_launch();
  }
  (write ? buffer.written : buffer.read) += bytes;
  if (!write)
    for (size_t j = offset; j < offset + bytes; j++)
      if (buffer.seen[j] != runtime.group + 1) buffer.seen[j] = runtime.group + 1, buffer.group_unique++;
  if (!buffer.cells) return;
  char name[24];
  snprintf(name, sizeof name, "buffer#%d", i);
  note(buffer.cells + offset, bytes,
       Access{write, true, pc, runtime.epoch_device + 1, runtime.simdgroup().epoch_device + 1, name, offset});
}

void access(uintptr_t address, size_t bytes, bool write, uint64_t pc) {
  if (runtime.current < 0) return;
  if (address - uintptr_t(arena) < ARENA_BYTES) return threadgroup_access(address - uintptr_t(arena), bytes, write, pc);
  if (address - uintptr_t(region) < BUFFER_SPACE * MAX_BUFFERS) return buffer_access(address, bytes, write, pc);
  const GpuThread& me = runtime.self().thread;
  if (address - uintptr_t(runtime.stack_of(int(me.index_in_group))) < STACK_BYTES) return;
  if (address - uintptr_t(&me) < sizeof me) return;
  Dl_info where;
  if (!write && dladdr((void*)address, &where) && where.dli_fbase == image) return;
  report(OUT_OF_BOUNDS, pc, 0, "%s of %zu bytes at an address that belongs to no memory of the kernel",
         write ? "write" : "read", bytes);
  abandon_launch();
}

void undefined(const char* what, void* pc) {
  if (runtime.current < 0) return;
  report(UNDEFINED, uint64_t(pc), 0, "%s", what);
  abandon_launch();
}

}  // namespace

// Memory for buffer number i, with nothing mapped right after its end.
extern "C" void* gpu_buffer(int i, size_t bytes) {
  const size_t size = BUFFER_SPACE * MAX_BUFFERS;
  if (!region) region = (char*)mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  char* start = region + BUFFER_SPACE * i + BUFFER_SPACE / 2;
  const size_t length = bytes ? (bytes + PAGE - 1) / PAGE * PAGE : PAGE;
  Buffer& buffer = runtime.buffers[i];
  if (buffer.mapped) {
    madvise(start, buffer.mapped, MADV_DONTNEED);
    mprotect(start, buffer.mapped, PROT_NONE);
  }
  mprotect(start, length, PROT_READ | PROT_WRITE);
  buffer.mapped = length;
  return start + (length - bytes) / 16 * 16;
}

extern "C" void* gpu_threadgroup_memory(int id, unsigned long bytes, unsigned long align, const char* name) {
  for (int i = 0; i < declaration_count; i++)
    if (declarations[i].id == id) return arena + declarations[i].offset;
  const size_t red = runtime.checked ? RED_ZONE : 0, offset = (arena_top + red + align - 1) / align * align;
  arena_needed = (arena_needed + align - 1) / align * align + bytes;  // as on a GPU, without red zones
  if (arena_needed > runtime.counts.threadgroup_bytes) runtime.counts.threadgroup_bytes = arena_needed;
  if (arena_needed > runtime.threadgroup_limit || offset + bytes + red > ARENA_BYTES || declaration_count == 64) {
    report(THREADGROUP_MEMORY, uint64_t(__builtin_return_address(0)), 0,
           "'%s' brings threadgroup memory to %zu bytes, and the limit is %zu", name, arena_needed,
           runtime.threadgroup_limit);
    abandon_launch();
  }
  declarations[declaration_count++] = Declaration{id, offset, bytes, name};
  arena_top = offset + bytes;
  return arena + offset;
}

void memory_begin_launch(const LaunchDescription& launch) {
  if (!arena) arena = (char*)mmap(nullptr, ARENA_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
  Dl_info where = {};
  dladdr((void*)launch.entry, &where);
  image = where.dli_fbase;
  runtime.buffer_count = launch.buffers;
  for (int i = 0; i < launch.buffers; i++) {
    Buffer& buffer = runtime.buffers[i];
    buffer.base = launch.base[i];
    buffer.size = launch.size[i];
    buffer.writable = launch.writable[i];
    buffer.filled = launch.filled[i];
    buffer.read = buffer.written = buffer.group_unique = 0;
    buffer.seen = runtime.checked ? (uint32_t*)calloc(buffer.size + 1, sizeof(uint32_t)) : nullptr;
    buffer.cells = runtime.checked && buffer.writable ? (Cell*)calloc(buffer.size + 1, sizeof(Cell)) : nullptr;
    if (buffer.cells && buffer.filled)
      for (size_t j = 0; j < buffer.size; j++) buffer.cells[j].written = 1;
  }
}

void memory_begin_group() {
  declaration_count = 0;
  memset(arena, 0xff, arena_top);  // not a number in every float type
  memset(arena_cells, 0, arena_top * sizeof(Cell));
  arena_top = arena_needed = 0;
}

void memory_end_launch() {
  for (int i = 0; i < runtime.buffer_count; i++) {
    Buffer& buffer = runtime.buffers[i];
    size_t unwritten = 0, first = 0;
    for (size_t j = 0; buffer.cells && j < buffer.size; j++)
      if (!buffer.cells[j].written && !unwritten++) first = j;
    if (unwritten && !runtime.aborted)
      report(NEVER_WRITTEN, 0, uint64_t(i), "%zu bytes of the output buffer#%d were never written, from byte %zu",
             unwritten, i, first);
    for (size_t j = 0; buffer.seen && j < buffer.size; j++) runtime.counts.unique[i] += buffer.seen[j] != 0;
    runtime.counts.read[i] = buffer.read;
    runtime.counts.written[i] = buffer.written;
    runtime.counts.group_unique[i] = buffer.group_unique;
    free(buffer.seen);
    free(buffer.cells);
    buffer.seen = nullptr;
    buffer.cells = nullptr;
  }
}

// The names that the compiler calls. Accesses wider than 16 bytes have none: the audit finds those.
#define CALLER uint64_t(__builtin_return_address(0))
#define HOOKS(prefix, n)                                                                   \
  extern "C" void __tsan_##prefix##read##n(void* a) { access(uintptr_t(a), n, false, CALLER); } \
  extern "C" void __tsan_##prefix##write##n(void* a) { access(uintptr_t(a), n, true, CALLER); } \
  extern "C" void __tsan_##prefix##read_write##n(void* a) {                                \
    access(uintptr_t(a), n, false, CALLER);                                                \
    access(uintptr_t(a), n, true, CALLER);                                                 \
  }
HOOKS(, 1) HOOKS(, 2) HOOKS(, 4) HOOKS(, 8) HOOKS(, 16)
HOOKS(unaligned_, 2) HOOKS(unaligned_, 4) HOOKS(unaligned_, 8) HOOKS(unaligned_, 16)
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void* __tsan_memcpy(void* to, const void* from, size_t n) {
  access(uintptr_t(from), n, false, CALLER);
  access(uintptr_t(to), n, true, CALLER);
  return memcpy(to, from, n);
}
extern "C" void* __tsan_memmove(void* to, const void* from, size_t n) {
  access(uintptr_t(from), n, false, CALLER);
  access(uintptr_t(to), n, true, CALLER);
  return memmove(to, from, n);
}
extern "C" void* __tsan_memset(void* to, int value, size_t n) {
  access(uintptr_t(to), n, true, CALLER);
  return memset(to, value, n);
}
#define UNDEFINED_HOOK(name, words) \
  extern "C" void __ubsan_handle_##name##_minimal() { undefined(words, __builtin_return_address(0)); }
UNDEFINED_HOOK(out_of_bounds, "index outside an array")
UNDEFINED_HOOK(divrem_overflow, "integer division by zero or overflow")
UNDEFINED_HOOK(shift_out_of_bounds, "shift by more than the type has bits")
UNDEFINED_HOOK(float_cast_overflow, "float outside the range of the integer type")

// Rounds to the nearest, ties to even. Older compiler libraries lack this helper for bfloat16.
extern "C" __attribute__((weak)) __bf16 __truncsfbf2(float x) {
  uint32_t bits = __builtin_bit_cast(uint32_t, x);
  if (x != x) bits |= 1u << 22; else bits += 0x7fff + (bits >> 16 & 1);
  return __builtin_bit_cast(__bf16, uint16_t(bits >> 16));
}
