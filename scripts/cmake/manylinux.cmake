# A toolchain for wheels: programs that run on Linux distributions with glibc 2.28 or newer (manylinux_2_28). gcc compiles,
# so instructions and bits are those of every other build; zig links, because it has the symbols of every glibc since 2.17
# and this machine's has the newest ones alone. scripts/wheel.sh sets the environment:
# ANYRANK_ZIG is zig's path, ANYRANK_WHEEL_ARCH x86_64 or aarch64.
set(arch $ENV{ANYRANK_WHEEL_ARCH})
if(NOT arch STREQUAL CMAKE_HOST_SYSTEM_PROCESSOR)
  include(${CMAKE_CURRENT_LIST_DIR}/${arch}.cmake)
else()
  set(CMAKE_C_COMPILER gcc)
  set(CMAKE_LIBRARY_ARCHITECTURE ${arch}-linux-gnu)
endif()
foreach(archive IN ITEMS libgomp.a libgcc.a)
  execute_process(COMMAND ${CMAKE_C_COMPILER} -print-file-name=${archive} OUTPUT_VARIABLE ${archive}
                  OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
endforeach()
# FindOpenMP would ask zig to link with -fopenmp.
set(OpenMP_C_FLAGS -fopenmp CACHE STRING "")
set(OpenMP_C_LIB_NAMES gomp CACHE STRING "")
set(OpenMP_gomp_LIBRARY ${libgomp.a} CACHE FILEPATH "")
# libgcc, not zig's run-time library: gcc's code asks it which instructions the processor has.
set(link "\"$ENV{ANYRANK_ZIG}\" cc -target ${arch}-linux-gnu.2.28")
set(libraries "<LINK_LIBRARIES> ${libgcc.a} -lpthread -ldl -lm")
set(CMAKE_C_LINK_EXECUTABLE "${link} -pie <LINK_FLAGS> <OBJECTS> -o <TARGET> ${libraries}")
set(CMAKE_C_CREATE_SHARED_LIBRARY
    "${link} -shared <LINK_FLAGS> <SONAME_FLAG><TARGET_SONAME> -o <TARGET> <OBJECTS> ${libraries}")
