# SPDX-License-Identifier: Apache-2.0
# Builds the clone that the port lies in: vcpkg install kvkeep --overlay-ports=cmake/ports/vcpkg

get_filename_component(SOURCE_PATH "${CURRENT_PORT_DIR}/../../.." ABSOLUTE)

vcpkg_check_features(
  OUT_FEATURE_OPTIONS
  FEATURE_OPTIONS
  FEATURES
  files
  KVKEEP_FILES
  folding
  KVKEEP_FOLDING
)
vcpkg_cmake_configure(
  SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS
    -DKVKEEP_TORCH=OFF
    -DKVKEEP_BUILD_CLI=OFF
    -DKVKEEP_BUILD_TESTS=OFF
    ${FEATURE_OPTIONS}
)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH lib/cmake/kvkeep)
vcpkg_fixup_pkgconfig()
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
