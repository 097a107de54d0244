# `cmake --install BUILD [--prefix P]` and `cmake --build BUILD -t uninstall`; the packages that find_package and
# pkg-config find. Nothing installed holds the prefix, so an installed tree may be moved.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/anyrank)
set(doc_dir ${CMAKE_INSTALL_DATADIR}/doc/anyrank)
set(python_dir ${CMAKE_INSTALL_DATADIR}/anyrank/python/anyrank)

# First of all rules: uninstalling removes the folders that installing made, and no others.
set(folders ${CMAKE_INSTALL_BINDIR} ${CMAKE_INSTALL_LIBDIR}/pkgconfig ${package_dir} ${CMAKE_INSTALL_INCLUDEDIR}/anyrank
  ${CMAKE_INSTALL_MANDIR}/man1 ${doc_dir}/docs)
foreach(folder bash-completion/completions zsh/site-functions fish/vendor_completions.d anyrank)
  list(APPEND folders ${CMAKE_INSTALL_DATADIR}/${folder})
endforeach()
foreach(tree IN ITEMS ref/data docs examples python/anyrank)
  set(place_of_ref/data ${CMAKE_INSTALL_DATADIR}/anyrank)
  set(place_of_docs ${doc_dir}/docs)
  set(place_of_examples ${doc_dir}/examples)
  set(place_of_python/anyrank ${python_dir})
  file(GLOB_RECURSE files RELATIVE ${CMAKE_CURRENT_SOURCE_DIR}/${tree} CONFIGURE_DEPENDS ${tree}/*)
  foreach(file IN LISTS files)
    get_filename_component(folder ${file} DIRECTORY)
    if(folder)
      list(APPEND folders ${place_of_${tree}}/${folder})
    endif()
  endforeach()
endforeach()
list(APPEND folders ${python_dir} ${python_dir}/lib ${CMAKE_INSTALL_DATADIR}/anyrank/python)
list(REMOVE_DUPLICATES folders)
configure_file(${CMAKE_CURRENT_LIST_DIR}/RecordFolders.cmake.in ${CMAKE_BINARY_DIR}/RecordFolders.cmake @ONLY)
install(SCRIPT ${CMAKE_BINARY_DIR}/RecordFolders.cmake)

# --- the library, its headers, the command, the data -----------------------------------------------------------------
# Libraries outside of the system's folders, such as CUDA's, are found where they were.
set_target_properties(anyrank PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)
install(TARGETS anyrank EXPORT anyrankTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
                                              ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/anyrank DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
if(TARGET anyrank_cli)
  set_target_properties(anyrank_cli PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)
  if(BUILD_SHARED_LIBS)
    file(RELATIVE_PATH lib_from_command ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
    set_target_properties(anyrank_cli PROPERTIES INSTALL_RPATH "$ORIGIN/${lib_from_command}")
  endif()
  install(TARGETS anyrank_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
install(DIRECTORY ref/data/ DESTINATION ${CMAKE_INSTALL_DATADIR}/anyrank)
# What explains differences (verify/explain), and the library by which it reads dumps.
install(DIRECTORY python/anyrank DESTINATION ${CMAKE_INSTALL_DATADIR}/anyrank/python
  FILES_MATCHING PATTERN "*.py" PATTERN "*.tsv" PATTERN "*.html" PATTERN "*.css" PATTERN "*.js" PATTERN tests EXCLUDE
                                                                             PATTERN __pycache__ EXCLUDE)
install(FILES ${CMAKE_BINARY_DIR}/python/VERSION DESTINATION ${python_dir})
install(TARGETS anyrank_abi LIBRARY DESTINATION ${python_dir}/lib)

# --- what is read ------------------------------------------------------------------------------------------------------
install(FILES LICENSE README.md CHANGELOG.md DESTINATION ${doc_dir})
install(DIRECTORY docs DESTINATION ${doc_dir} FILES_MATCHING PATTERN "*.md" PATTERN "*.tsv" PATTERN "*.png" PATTERN "*.svg")
install(DIRECTORY examples DESTINATION ${doc_dir} USE_SOURCE_PERMISSIONS PATTERN __pycache__ EXCLUDE
                                                                         PATTERN examples/ci/out EXCLUDE)
# Manual pages and completions: what is written by hand, and the options out of the command's own tables.
if(TARGET anyrank_cli)
  set(described ${CMAKE_BINARY_DIR}/described)
  file(MAKE_DIRECTORY ${described})
  file(GLOB templates CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/cli/man/*.in ${CMAKE_CURRENT_SOURCE_DIR}/cli/completions/*.in)
  foreach(template IN LISTS templates)
    get_filename_component(name ${template} NAME)
    string(REGEX REPLACE "\\.in$" "" name ${name})
    add_custom_command(OUTPUT ${described}/${name} COMMAND anyrank_cli describe ${template} ${described}/${name}
      DEPENDS anyrank_cli ${template} VERBATIM COMMENT "Describing the options in ${name}")
    list(APPEND pages ${described}/${name})
  endforeach()
  # ThreadSanitizer may refuse to start on the kernel that builds.
  if(NOT ANYRANK_SANITIZE STREQUAL "thread")
    set(always ALL)
  endif()
  add_custom_target(described ${always} DEPENDS ${pages})
  list(FILTER pages INCLUDE REGEX "\\.1$")
  install(FILES ${pages} DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
  install(FILES ${described}/anyrank.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME anyrank)
  install(FILES ${described}/_anyrank DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
  install(FILES ${described}/anyrank.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)
endif()

# --- find_package ------------------------------------------------------------------------------------------------------
install(EXPORT anyrankTargets NAMESPACE anyrank:: DESTINATION ${package_dir})
set(uses_openmp OFF)
if(TARGET OpenMP::OpenMP_C AND NOT ANYRANK_SANITIZE STREQUAL "thread")
  set(uses_openmp ON)
endif()
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/anyrankConfig.cmake.in
  ${CMAKE_BINARY_DIR}/package/anyrankConfig.cmake INSTALL_DESTINATION ${package_dir}
  PATH_VARS CMAKE_INSTALL_DATADIR NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/package/anyrankConfigVersion.cmake
  COMPATIBILITY SameMajorVersion)
install(FILES ${CMAKE_BINARY_DIR}/package/anyrankConfig.cmake ${CMAKE_BINARY_DIR}/package/anyrankConfigVersion.cmake
  ${CMAKE_CURRENT_LIST_DIR}/FindAnyrankBLAS.cmake ${CMAKE_CURRENT_LIST_DIR}/FindJansson.cmake DESTINATION ${package_dir})

# --- pkg-config ----------------------------------------------------------------------------------------------------------
# Sets `result` to the linker's flag for a library given as a path. Its folder is this machine's: where the linker does
# not look there by itself, whoever links says where it is.
function(link_flags result library)
  get_filename_component(name ${library} NAME)
  if(name MATCHES "\\.so\\.[0-9.]+$")
    set(${result} "-l:${name}" PARENT_SCOPE)
    return()
  endif()
  get_filename_component(name ${library} NAME_WE)
  string(REGEX REPLACE "^lib" "-l" flags ${name})
  set(${result} ${flags} PARENT_SCOPE)
endfunction()
foreach(library IN ITEMS ${ANYRANK_BLAS_LIBRARIES} ${JANSSON_LIBRARY})
  link_flags(flags ${library})
  string(APPEND private_libs " ${flags}")
endforeach()
if(uses_openmp)
  foreach(name IN LISTS OpenMP_C_LIB_NAMES)
    link_flags(flags ${OpenMP_${name}_LIBRARY})
    string(APPEND private_libs " ${flags}")
  endforeach()
endif()
get_property(library_paths GLOBAL PROPERTY ANYRANK_LIBRARY_PATHS)
foreach(library IN LISTS library_paths)
  link_flags(flags ${library})
  string(APPEND private_libs " ${flags}")
endforeach()
file(RELATIVE_PATH prefix_from_pc ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" prefix_from_pc ${prefix_from_pc})
foreach(dir LIBDIR INCLUDEDIR DATADIR)
  set(pc_${dir} ${CMAKE_INSTALL_${dir}})
  if(NOT IS_ABSOLUTE "${pc_${dir}}")
    string(PREPEND pc_${dir} "\${prefix}/")
  endif()
endforeach()
configure_file(${CMAKE_CURRENT_LIST_DIR}/anyrank.pc.in ${CMAKE_BINARY_DIR}/package/anyrank.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/package/anyrank.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

# --- uninstall -----------------------------------------------------------------------------------------------------------
if(PROJECT_IS_TOP_LEVEL)
  add_custom_target(uninstall COMMENT "Removing what was installed last"
    COMMAND ${CMAKE_COMMAND} -DBUILD_DIR=${CMAKE_BINARY_DIR} -P ${CMAKE_CURRENT_LIST_DIR}/Uninstall.cmake)
endif()
