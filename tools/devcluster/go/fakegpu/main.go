// Command fakegpu is a device plugin that advertises imaginary GPUs, so that requests for GPUs are really scheduled and
// counted. A container that gets some finds their ids in NVIDIA_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const socketName = "agenticrun-fakegpu.sock"

type plugin struct {
	api.UnimplementedDevicePluginServer
	count int
}

func (plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

func (p plugin) ListAndWatch(_ *api.Empty, stream api.DevicePlugin_ListAndWatchServer) error {
	devices := make([]*api.Device, p.count)
	for i := range devices {
		devices[i] = &api.Device{ID: strconv.Itoa(i), Health: api.Healthy}
	}
	if err := stream.Send(&api.ListAndWatchResponse{Devices: devices}); err != nil {
		return err
	}
	<-stream.Context().Done() // imaginary devices never fail: nothing more to tell
	return nil
}

func (plugin) Allocate(_ context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	response := &api.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		ids := strings.Join(container.DevicesIds, ",")
		response.ContainerResponses = append(response.ContainerResponses, &api.ContainerAllocateResponse{
			Envs: map[string]string{
				"NVIDIA_VISIBLE_DEVICES": ids, "CUDA_VISIBLE_DEVICES": ids,
				"AGENTICRUN_SIMULATED_GPUS": "1", // else ranks and engines would refuse to compute on CPUs
			},
		})
	}
	return response, nil
}

// serve registers with the kubelet and returns when the kubelet has restarted, or could not be reached.
func serve(folder, resource string, count int) error {
	socket := filepath.Join(folder, socketName)
	if err := os.Remove(socket); err != nil && !os.IsNotExist(err) {
		return err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	defer server.Stop()
	api.RegisterDevicePluginServer(server, plugin{count: count})
	go server.Serve(listener) //nolint:errcheck // ends with server.Stop

	kubelet, err := grpc.NewClient("unix://"+filepath.Join(folder, "kubelet.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer kubelet.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	request := &api.RegisterRequest{Version: api.Version, Endpoint: socketName, ResourceName: resource}
	if _, err := api.NewRegistrationClient(kubelet).Register(ctx, request); err != nil {
		return err
	}
	log.Printf("registered %d x %s", count, resource)
	for { // the kubelet empties the folder when it starts
		time.Sleep(time.Second)
		if _, err := os.Stat(socket); err != nil {
			return fmt.Errorf("the kubelet restarted: %w", err)
		}
	}
}

func main() {
	count := flag.Int("count", 8, "number of devices")
	resource := flag.String("resource", "nvidia.com/gpu", "resource name")
	folder := flag.String("folder", api.DevicePluginPath, "the kubelet's device plugin folder")
	flag.Parse()
	for {
		log.Print(serve(*folder, *resource, *count))
		time.Sleep(500 * time.Millisecond)
	}
}
