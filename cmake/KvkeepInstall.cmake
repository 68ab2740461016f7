# SPDX-License-Identifier: Apache-2.0
# cmake --install: headers, libraries, the command, and what find_package(kvkeep) reads: kvkeepTargets.cmake, and
# kvkeepTorchTargets.cmake with the targets that need LibTorch.

set(config_dir "${CMAKE_INSTALL_LIBDIR}/cmake/kvkeep")

# What a build leaves out is not installed either.
set(left_out "")
if(NOT KVKEEP_FOLDING)
  list(
    APPEND left_out
    /memory$
    /parts/folds.h
    /policy/folded_memory.h
    /policy/rest_options.h
    /policy/sekv.h
  )
  list(APPEND left_out "/simd/(factorise|memory)_lanes")
endif()
if(NOT KVKEEP_FILES)
  list(APPEND left_out /io$ /policy/plugin.h /state$ /trace$)
endif()
if(NOT TARGET kvkeep_command)
  list(APPEND left_out /cli$)
endif()
set(excluded "")
foreach(pattern IN LISTS left_out)
  list(APPEND excluded REGEX "/include/kvkeep${pattern}" EXCLUDE)
endforeach()
install(
  DIRECTORY include/kvkeep "${CMAKE_CURRENT_BINARY_DIR}/generated/kvkeep"
  DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
  FILES_MATCHING
  PATTERN "*.h" ${excluded}
)
if(NOT SKBUILD) # the wheel has them where wheels have them
  install(FILES LICENSE cmake/THIRD_PARTY.md DESTINATION "${CMAKE_INSTALL_DOCDIR}")
  # A port may lack the examples.
  install(FILES examples/embed.cpp DESTINATION "${CMAKE_INSTALL_DOCDIR}/examples" OPTIONAL)
  if(KVKEEP_FILES)
    install(DIRECTORY examples/plugin DESTINATION "${CMAKE_INSTALL_DOCDIR}/examples" OPTIONAL)
  endif()
endif()
install(TARGETS kvkeep_core kvkeep_header_only kvkeep EXPORT kvkeepTargets)
if(TARGET kvkeep_llama_preload AND NOT SKBUILD)
  install(TARGETS kvkeep_llama_preload)
endif()
if(KVKEEP_HIGHWAY_SOURCE) # it was loaded
  install(TARGETS hwy EXPORT kvkeepTargets)
  install(
    DIRECTORY "${KVKEEP_HIGHWAY_SOURCE}/hwy"
    DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
    FILES_MATCHING
    PATTERN "*.h"
    PATTERN contrib EXCLUDE
    PATTERN examples EXCLUDE
    PATTERN tests EXCLUDE
  )
endif()
install(EXPORT kvkeepTargets NAMESPACE kvkeep:: DESTINATION "${config_dir}")
if(KVKEEP_TORCH)
  install(TARGETS kvkeep_torch EXPORT kvkeepTorchTargets)
  install(FILES cmake/KvkeepTorch.cmake DESTINATION "${config_dir}")
  if(TARGET kvkeep_cuda)
    install(TARGETS kvkeep_cuda EXPORT kvkeepTorchTargets)
    install(
      DIRECTORY cuda/
      DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/kvkeep/cuda"
      FILES_MATCHING
      PATTERN "*.h"
      PATTERN "*.cuh"
    )
    if(NOT BUILD_SHARED_LIBS)
      install(TARGETS kvkeep_kernels EXPORT kvkeepTorchTargets)
    endif()
  endif()
  install(EXPORT kvkeepTorchTargets NAMESPACE kvkeep:: DESTINATION "${config_dir}")
endif()
if(TARGET kvkeep_command AND NOT SKBUILD) # the wheel has the program alone
  install(TARGETS kvkeep_command EXPORT kvkeepCommandTargets)
  install(EXPORT kvkeepCommandTargets NAMESPACE kvkeep:: DESTINATION "${config_dir}")
endif()
if(TARGET kvkeep_cli AND NOT KVKEEP_BUILD_LAB)
  install(TARGETS kvkeep_cli)
endif()
if(TARGET kvkeep_cli AND NOT SKBUILD)
  set(completed "${CMAKE_INSTALL_DATADIR}")
  install(FILES src/cli/completion.bash DESTINATION "${completed}/bash-completion/completions" RENAME kvkeep)
  install(FILES src/cli/completion.zsh DESTINATION "${completed}/zsh/site-functions" RENAME _kvkeep)
  install(FILES src/cli/completion.fish DESTINATION "${completed}/fish/vendor_completions.d" RENAME kvkeep.fish)
  if(NOT CMAKE_CROSSCOMPILING)
    add_custom_command(
      OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/kvkeep.1"
      COMMAND kvkeep_cli help --man > "${CMAKE_CURRENT_BINARY_DIR}/kvkeep.1"
      DEPENDS kvkeep_cli
    )
    add_custom_target(kvkeep_man ALL DEPENDS "${CMAKE_CURRENT_BINARY_DIR}/kvkeep.1")
    # A build of some targets alone may lack it.
    install(FILES "${CMAKE_CURRENT_BINARY_DIR}/kvkeep.1" DESTINATION "${CMAKE_INSTALL_MANDIR}/man1" OPTIONAL)
  endif()
endif()

# For programs that do not use CMake: kvkeep.pc, found from where it lies.
file(RELATIVE_PATH KVKEEP_PC_PREFIX "/prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/prefix")
set(KVKEEP_PC_REQUIRES_PRIVATE "")
set(KVKEEP_PC_LIBS_PRIVATE "")
if(KVKEEP_HIGHWAY_SOURCE)
  set(KVKEEP_PC_LIBS_PRIVATE "-lhwy ")
elseif(NOT BUILD_SHARED_LIBS) # else flags of Highway's, and a need for its libhwy.pc, would reach every program
  set(KVKEEP_PC_REQUIRES_PRIVATE libhwy)
endif()
get_target_property(definitions kvkeep_core INTERFACE_COMPILE_DEFINITIONS)
set(KVKEEP_PC_CFLAGS "")
foreach(definition IN LISTS definitions)
  if(definition)
    string(APPEND KVKEEP_PC_CFLAGS " -D${definition}")
  endif()
endforeach()
configure_file(cmake/kvkeep.pc.in kvkeep.pc @ONLY)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/kvkeep.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")

set(KVKEEP_CONFIG_HIGHWAY ON) # a consumer finds its own
if(KVKEEP_HIGHWAY_SOURCE)
  set(KVKEEP_CONFIG_HIGHWAY OFF)
endif()
set(KVKEEP_CONFIG_STATIC_DEPENDENCIES "") # of kvkeepTargets
set(KVKEEP_CONFIG_STATIC_TORCH_DEPENDENCIES "")
if(NOT BUILD_SHARED_LIBS)
  if(KVKEEP_CONFIG_HIGHWAY)
    set(KVKEEP_CONFIG_STATIC_DEPENDENCIES "find_dependency(hwy 1.0)")
  endif()
  if(TARGET kvkeep_cuda)
    string(APPEND KVKEEP_CONFIG_STATIC_TORCH_DEPENDENCIES "\nfind_dependency(CUDAToolkit)")
  endif()
endif()
configure_package_config_file(cmake/kvkeepConfig.cmake.in kvkeepConfig.cmake INSTALL_DESTINATION "${config_dir}")
write_basic_package_version_file(kvkeepConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(
  FILES "${CMAKE_CURRENT_BINARY_DIR}/kvkeepConfig.cmake" "${CMAKE_CURRENT_BINARY_DIR}/kvkeepConfigVersion.cmake"
  DESTINATION "${config_dir}"
)
