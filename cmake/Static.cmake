# For -DANYRANK_STATIC=ON: what find_library finds until CMAKE_FIND_LIBRARY_SUFFIXES is suffixes_elsewhere again is an
# archive. cuBLAS and NCCL are loaded when they are needed, in any build. MPI launchers need their own library.
if(BUILD_SHARED_LIBS)
  message(FATAL_ERROR "-DANYRANK_STATIC=ON and -DBUILD_SHARED_LIBS=ON exclude each other")
endif()
set(ANYRANK_MPI OFF)
foreach(cached IN ITEMS BLIS_LIBRARY OPENBLAS_LIBRARY JANSSON_LIBRARY OpenMP_gomp_LIBRARY OpenMP_pthread_LIBRARY)
  if(NOT "${${cached}}" MATCHES "\\.a$")
    unset(${cached} CACHE) # of an earlier configuration
  endif()
endforeach()
set(suffixes_elsewhere ${CMAKE_FIND_LIBRARY_SUFFIXES})
set(CMAKE_FIND_LIBRARY_SUFFIXES .a)
