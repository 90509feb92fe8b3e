// Reads of private values that were never set. The build "private" is made for clang's kernel memory sanitizer, whose
// calls ask where the shadow of an address is: a bit per bit, set where nothing was written. Fibers' stacks have a
// shadow here; all other memory counts as set, and what is stored there must be.
#include <sys/mman.h>

#include <cstring>

#include "state.h"

namespace {

struct Metadata { void* shadow; void* origin; };
constexpr size_t STACKS = (STACK_BYTES + GUARD_BYTES) * MAX_THREADS, LARGEST = 4096, CONTEXT = 8192;

char* shadow_of_stacks;
char contexts[MAX_THREADS][CONTEXT];  // shadows of arguments and results, per fiber
char clean[LARGEST], stored[LARGEST], origins[LARGEST];
size_t stored_bytes;  // of the last store outside the stacks; its shadow is in `stored`
uint64_t stored_pc;

char* shadow(const void* address) {
  const size_t offset = size_t((const char*)address - runtime.stacks);
  if (offset >= STACKS) return nullptr;
  if (!shadow_of_stacks)
    shadow_of_stacks = (char*)mmap(nullptr, STACKS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  return shadow_of_stacks + offset;
}

bool unset(const char* bits, size_t bytes) {
  for (size_t i = 0; bits && i < bytes; i++)
    if (bits[i]) return true;
  return false;
}

void must_be_set(const char* bits, size_t bytes, uint64_t pc, const char* what) {
  if (runtime.current >= 0 && unset(bits, bytes))
    report(UNINITIALISED, pc, 0, "%s a private value that was never set", what);
}

Metadata metadata(void* address, size_t bytes, bool store, void* pc) {
  private_flush();
  if (char* bits = shadow(address)) return {bits, origins};
  if (!store) return {clean, origins};
  stored_bytes = bytes < LARGEST ? bytes : LARGEST;
  stored_pc = uint64_t(pc);
  return {stored, origins};
}

void copied(void* to, const void* from, size_t bytes, void* pc) {
  private_flush();
  const char* source = shadow(from);
  char* target = shadow(to);
  if (target && source) memmove(target, source, bytes);
  else if (target) memset(target, 0, bytes);
  else must_be_set(source, bytes, uint64_t(pc), "this stores");
}

}  // namespace

void private_flush() {
  if (!stored_bytes) return;
  must_be_set(stored, stored_bytes, stored_pc, "this stores");
  memset(stored, 0, stored_bytes);
  stored_bytes = 0;
}

void private_check(const void* value, size_t bytes, uint64_t pc) {
  private_flush();
  must_be_set(shadow(value), bytes, pc, "this gives other lanes");
}

#define CALLER __builtin_return_address(0)
#define METADATA(n)                                                                                                   \
  extern "C" Metadata __msan_metadata_ptr_for_load_##n(void* a) { return metadata(a, n, false, CALLER); }             \
  extern "C" Metadata __msan_metadata_ptr_for_store_##n(void* a) { return metadata(a, n, true, CALLER); }
METADATA(1) METADATA(2) METADATA(4) METADATA(8)
extern "C" Metadata __msan_metadata_ptr_for_load_n(void* a, uint64_t n) { return metadata(a, n, false, CALLER); }
extern "C" Metadata __msan_metadata_ptr_for_store_n(void* a, uint64_t n) { return metadata(a, n, true, CALLER); }
extern "C" void* __msan_get_context_state() { return contexts[runtime.current < 0 ? 0 : runtime.current]; }
extern "C" uint32_t __msan_chain_origin(uint32_t origin) { return origin; }
extern "C" void __msan_poison_alloca(void* address, uint64_t bytes, const char*) {
  if (char* bits = shadow(address)) memset(bits, 0xff, bytes);
}
extern "C" void __msan_unpoison_alloca(void* address, uint64_t bytes) {
  if (char* bits = shadow(address)) memset(bits, 0, bytes);
}
extern "C" void __msan_warning(uint32_t) {
  const char set = 1;
  must_be_set(&set, 1, uint64_t(CALLER), "this depends on");
}
extern "C" void* __msan_memcpy(void* to, const void* from, uint64_t n) {
  copied(to, from, n, CALLER);
  return memcpy(to, from, n);
}
extern "C" void* __msan_memmove(void* to, const void* from, uint64_t n) {
  copied(to, from, n, CALLER);
  return memmove(to, from, n);
}
extern "C" void* __msan_memset(void* to, int value, uint64_t n) {
  __msan_unpoison_alloca(to, n);
  return memset(to, value, n);
}
