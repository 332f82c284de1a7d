// Command imagectl pulls or removes images through the CRI, so that the node's runtime treats them as if the kubelet had
// asked: its registry configuration applies, and unpacked layers are not kept a second time.
//
//	imagectl SOCKET pull|remove REFERENCE...
package main

import (
	"context"
	"fmt"
	"os"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func run(socket, verb string, references []string) error {
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	images := cri.NewImageServiceClient(connection)
	for _, reference := range references {
		image := &cri.ImageSpec{Image: reference}
		switch verb {
		case "pull":
			_, err = images.PullImage(context.Background(), &cri.PullImageRequest{Image: image})
		case "remove":
			_, err = images.RemoveImage(context.Background(), &cri.RemoveImageRequest{Image: image})
		default:
			return fmt.Errorf("unknown verb %q", verb)
		}
		if err != nil {
			return fmt.Errorf("%s %s: %w", verb, reference, err)
		}
	}
	return nil
}

func main() {
	if len(os.Args) < 4 {
		fmt.Fprintln(os.Stderr, "usage: imagectl SOCKET pull|remove REFERENCE...")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2], os.Args[3:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
