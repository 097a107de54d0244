# Finds Criterion by its header and library. No header has its version: pkg-config gives it where it can, and without one
# a header that 2.4 brought must do. Defines the target Criterion::Criterion.
find_package(PkgConfig QUIET)
if(PKG_CONFIG_FOUND)
  pkg_check_modules(PC_CRITERION QUIET criterion)
endif()
find_path(CRITERION_INCLUDE_DIR criterion/new/assert.h HINTS ${PC_CRITERION_INCLUDE_DIRS} ${PC_CRITERION_INCLUDEDIR})
find_library(CRITERION_LIBRARY NAMES criterion HINTS ${PC_CRITERION_LIBRARY_DIRS} ${PC_CRITERION_LIBDIR})
set(Criterion_VERSION ${PC_CRITERION_VERSION})
if(NOT Criterion_VERSION)
  set(Criterion_VERSION ${Criterion_FIND_VERSION})
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Criterion REQUIRED_VARS CRITERION_LIBRARY CRITERION_INCLUDE_DIR
  VERSION_VAR Criterion_VERSION)
if(Criterion_FOUND AND NOT TARGET Criterion::Criterion)
  add_library(Criterion::Criterion UNKNOWN IMPORTED)
  set_target_properties(Criterion::Criterion PROPERTIES IMPORTED_LOCATION "${CRITERION_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES "${CRITERION_INCLUDE_DIR}")
endif()
mark_as_advanced(CRITERION_INCLUDE_DIR CRITERION_LIBRARY)
