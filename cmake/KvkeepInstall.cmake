# cmake --install: headers, libraries, the command, and what find_package(kvkeep) reads.

set(config_dir "${CMAKE_INSTALL_LIBDIR}/cmake/kvkeep")

install(DIRECTORY include/kvkeep "${CMAKE_CURRENT_BINARY_DIR}/generated/kvkeep" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" FILES_MATCHING PATTERN "*.h")
install(TARGETS kvkeep_core kvkeep kvkeep_lm EXPORT kvkeepTargets)
if(TARGET kvkeep_cuda)
  install(TARGETS kvkeep_cuda EXPORT kvkeepTargets)
  install(DIRECTORY cuda/ DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/kvkeep/cuda" FILES_MATCHING PATTERN "*.h")
  if(NOT BUILD_SHARED_LIBS)
    install(TARGETS kvkeep_kernels EXPORT kvkeepTargets)
  endif()
endif()
install(EXPORT kvkeepTargets NAMESPACE kvkeep:: DESTINATION "${config_dir}")
if(TARGET kvkeep_cli)
  install(TARGETS kvkeep_cli)
endif()

set(KVKEEP_CONFIG_STATIC_DEPENDENCIES "")
if(NOT BUILD_SHARED_LIBS)
  set(KVKEEP_CONFIG_STATIC_DEPENDENCIES "find_dependency(hwy 1.0)")
  if(TARGET kvkeep_cuda)
    string(APPEND KVKEEP_CONFIG_STATIC_DEPENDENCIES "\nfind_dependency(CUDAToolkit)")
  endif()
endif()
configure_package_config_file(cmake/kvkeepConfig.cmake.in kvkeepConfig.cmake INSTALL_DESTINATION "${config_dir}")
write_basic_package_version_file(kvkeepConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/kvkeepConfig.cmake" "${CMAKE_CURRENT_BINARY_DIR}/kvkeepConfigVersion.cmake" cmake/KvkeepTorch.cmake
        DESTINATION "${config_dir}")
