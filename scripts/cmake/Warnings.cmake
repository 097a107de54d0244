# One interface target carries the flags every file of the project is compiled with.
add_library(anyrank_options INTERFACE)
target_compile_options(anyrank_options INTERFACE
  -Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wundef
  $<$<COMPILE_LANGUAGE:C>:-Wstrict-prototypes$<SEMICOLON>-Wmissing-prototypes>
  -Wvla -Wcast-qual -Wdouble-promotion -Wformat=2 -Wno-unknown-pragmas
  # Of the compiler that the project is developed with; others, and newer ones, warn of other things.
  $<$<AND:$<COMPILE_LANG_AND_ID:C,GNU>,$<VERSION_LESS:$<C_COMPILER_VERSION>,13>>:-Werror>
  $<$<AND:$<COMPILE_LANG_AND_ID:CXX,GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:-Werror>
  # Bits depend on these two: no fused multiply-add that the source does not spell, no re-association.
  -ffp-contract=off -fno-fast-math -fno-math-errno -fno-trapping-math)
target_compile_definitions(anyrank_options INTERFACE _GNU_SOURCE _DARWIN_C_SOURCE $<$<BOOL:${ANYRANK_POSIX_ONLY}>:ARI_POSIX_ONLY=1>)
